"""Model families (`model.family`) and known shapes (`model.preset`).

Each family defines its architecture, module and Hugging Face format. The shapes and their sources
are in presets.yaml. Control plane and node plane both import this module, and no other module
compares family names. It imports no model code, because `module` is only a dotted name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from .tables import read_table

# Fraction of tokens that masked models predict (Devlin et al. 2018, arXiv:1810.04805, section 3.1).
MASKED = 0.15
Json = Mapping[str, Any]
NONE: Json = MappingProxyType({})


# A NamedTuple, because every verb loads this class and a dataclass takes six times as long.
class Folder(NamedTuple):
    """Hugging Face format of a family.

    The attributes up to `window` describe config.json (config/huggingface_config.py). The others
    describe the weights (models/huggingface_weights.py).

    Attributes:
        architecture: Value of `architectures`.
        keys: Maps our dimensions to config.json keys.
        fixed: Other keys and their required values.
        written: Additional keys to write.
        refused: Keys that must be absent or have this value, because other values may change the
            function or the weights. They are not written.
        dropouts: Additional keys that must equal the single dropout rate.
        defaults: Values that `transformers` assumes for keys that older files omit.
        same_as: Maps a key that older files omit to the key with the same value.
        four_times: Maps a key that older files omit to the key with a quarter of its value.
        aliases: Maps alternative key names, which take precedence, to keys.
        window: Key of the attention window, which limits the sequence length.
        trunk: Prefix of all weight names except `heads`.
        names: Maps our weight names to theirs inside the trunk. Matrices with the same name
            there are concatenated.
        own: Pattern for weight names that are the same.
        heads: Maps our weight names to theirs outside the trunk.
        turned: Whether matrices are transposed.
        ignored: Pattern for weights that are skipped and reported: buffers of older versions, tied
            copies and an untrained head.
    """

    architecture: str
    keys: Mapping[str, str]
    fixed: Json = NONE
    written: Json = NONE
    refused: Json = NONE
    dropouts: tuple[str, ...] = ()
    defaults: Json = NONE
    same_as: Mapping[str, str] = NONE
    four_times: Mapping[str, str] = NONE
    aliases: Mapping[str, str] = NONE
    window: str = ""
    trunk: str = "model"
    names: Mapping[str, str] = NONE
    own: str = ""
    heads: Mapping[str, str] = MappingProxyType({"lm_head": "lm_head"})
    turned: bool = False
    ignored: str = r"rotary_emb\.inv_freq$"


class Slices(NamedTuple):
    """Partitioning of a family's weights in AWS's examples for NxD Core (the nxd platform).

    Key/value heads are replicated if there are fewer of them than tensor ranks.

    Attributes:
        column: Pattern for matrices that are split by output across tensor ranks.
        row: Pattern for matrices that are split by input across tensor ranks.
        tied: The two names of the tied tensor.
        fused: Whether gate and up projections form one tensor, and query, key and value another.
        staged: Whether the model can be split into pipeline stages.
    """

    column: str
    row: str
    tied: tuple[str, str]
    fused: bool = False
    staged: bool = True


@dataclass(frozen=True)
class Family:
    """Model architecture.

    The flags from `biases` to `gelu` distinguish decoders with rotary positions.

    Attributes:
        objective: next (predict the next token), masked (predict masked tokens) or pairs (predict
            masked tokens, and whether text B follows text A).
        module: Dotted name of the network.
        rotary: Whether positions are rotary embeddings. Otherwise they are learned.
        positions_from: Row of position 0 in learned positions.
        biases: Whether query, key and value have biases.
        normed: Whether query and key are normalized per "head", over "all" heads, or not at all
            ("").
        normed_after: Whether a block normalizes the outputs of its modules, not their inputs.
        gains_from_one: Whether a norm's gain is its weight plus 1.
        scaled: Whether embeddings are multiplied by the square root of their width.
        gelu: Whether GELU replaces SiLU.
        tanh: Whether GELU uses the tanh approximation.
        xla: Whether engine/parallel can build the model from NxD Core's layers.
        slices: Partitioning in AWS's examples, or None if they lack this family.
    """

    name: str
    objective: str
    module: str
    folder: Folder
    rotary: bool = False
    positions_from: int = 0
    segments: int = 0
    dropout: float = 0.0
    norm_eps: float = 1e-5
    biases: bool = False
    normed: str = ""  # "", "head" or "all"
    normed_after: bool = False
    gains_from_one: bool = False
    scaled: bool = False
    gelu: bool = False
    tanh: bool = False
    xla: bool = False
    slices: Slices | None = None

    @property
    def causal(self) -> bool:
        """Returns whether a token attends only to earlier tokens."""
        return self.objective == "next"

    @property
    def scalable(self) -> bool:
        """Returns whether `transformers` can scale the positions as in Llama 3.1."""
        return self.rotary and "rope_scaling" not in self.folder.refused

    @property
    def copies_heads(self) -> bool:
        """Returns whether NxD Core can replicate a key/value head across tensor ranks."""
        return self.xla and self.rotary

    def guesses(self, sequence_length: int) -> int:
        """Returns the number of predicted tokens per sequence, over which the loss is averaged. It
        is the same for every sequence, so means of means are exact.
        """
        return sequence_length if self.causal else max(1, round(MASKED * sequence_length))


_SAME = "vocab_size hidden_size intermediate_size max_position_embeddings tie_word_embeddings"
_COMMON = {name: name for name in _SAME.split()} | {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
_LLAMA = _COMMON | {"norm_eps": "rms_norm_eps", "kv_heads": "num_key_value_heads"}
_BERT = _COMMON | {"norm_eps": "layer_norm_eps", "dropout": "hidden_dropout_prob"}
_GPT2 = _COMMON | {
    "hidden_size": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "dropout": "resid_pdrop",
}
_GPT2_NAMES = {
    "embed.tokens": "wte",
    "embed.positions": "wpe",
    "layers.": "h.",
    "input_layernorm": "ln_1",
    "norm.": "ln_f.",
    "post_attention_layernorm": "ln_2",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_ENCODER_NAMES = {
    "embed.tokens": "embeddings.word_embeddings",
    "embed.positions": "embeddings.position_embeddings",
    "embed.segments": "embeddings.token_type_embeddings",
    "embed.norm": "embeddings.LayerNorm",
    "layers.": "encoder.layer.",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "mlp_norm": "output.LayerNorm",
    "pooler.dense": "pooler.dense",
}
_OWN_NAMES = (
    r"embed_tokens|norm|(input|post_attention|post_feedforward)_layernorm"
    r"|self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj"
)
_PLAIN = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
_ENCODER = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
_PARTS = {"add_cross_attention": False, "pruned_heads": {}}
_TIED = {"tie_word_embeddings": True}  # default in older architectures


def _rotary(architecture: str, fixed: Json, epsilon: float = 1e-6, **more: Any) -> Folder:
    defaults = {"tie_word_embeddings": False, "rms_norm_eps": epsilon} | more.pop("defaults", {})
    return Folder(
        architecture,
        _LLAMA,
        fixed,
        refused={"partial_rotary_factor": 1.0} | more.pop("refused", {}),
        defaults=defaults,
        own=_OWN_NAMES,
        **more,
    )


def _encoder(architecture: str, fixed: Json, **more: Any) -> Folder:
    return Folder(
        architecture,
        _BERT,
        {**_ENCODER, **fixed},
        refused={"is_decoder": False, **_PARTS},
        dropouts=("attention_probs_dropout_prob",),
        defaults=_TIED,
        names=_ENCODER_NAMES,
        **more,
    )


_SILU = {"hidden_act": "silu"}
_NO_BIAS = {"attention_bias": False}
_OWN_HEADS = {"num_key_value_heads": "num_attention_heads"}
LLAMA = "trainfleet.models.llama:Llama"
_LLAMA_SLICES = Slices(
    r"(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj)\.weight$",
    r"(o_proj|down_proj)\.weight$",
    ("lm_head.weight", "model.embed_tokens.weight"),
    fused=True,
)
# Gemma: arXiv:2403.08295
FAMILIES = {
    family.name: family
    for family in (
        Family(
            "llama",
            "next",
            LLAMA,
            rotary=True,
            xla=True,
            slices=_LLAMA_SLICES,
            folder=_rotary(
                "LlamaForCausalLM", {**_SILU, **_NO_BIAS, "mlp_bias": False}, same_as=_OWN_HEADS
            ),
        ),
        # Llama with an attention window. trainfleet limits sequences to the window, so attention
        # always covers the whole sequence.
        Family(
            "mistral",
            "next",
            LLAMA,
            rotary=True,
            slices=_LLAMA_SLICES,
            folder=_rotary(
                "MistralForCausalLM",
                _SILU,
                window="sliding_window",
                written={"sliding_window": None},
            ),
        ),
        Family(
            "qwen2",
            "next",
            LLAMA,
            rotary=True,
            norm_eps=1e-6,
            biases=True,  # arXiv:2412.15115
            folder=_rotary("Qwen2ForCausalLM", {**_SILU, "use_sliding_window": False}),
        ),
        Family(
            "qwen3",
            "next",
            LLAMA,
            rotary=True,
            norm_eps=1e-6,
            normed="head",  # arXiv:2505.09388
            folder=_rotary(
                "Qwen3ForCausalLM",
                {**_SILU, **_NO_BIAS, "use_sliding_window": False},
                defaults={"head_dim": 128},
            ),
        ),
        Family(
            "olmo2",
            "next",
            "trainfleet.models.llama:Olmo2",
            rotary=True,
            norm_eps=1e-6,
            normed="all",
            normed_after=True,  # arXiv:2501.00656
            folder=_rotary("Olmo2ForCausalLM", {**_SILU, **_NO_BIAS}, 1e-5, same_as=_OWN_HEADS),
        ),
        Family(
            "gemma",
            "next",
            LLAMA,
            rotary=True,
            norm_eps=1e-6,
            gains_from_one=True,
            scaled=True,
            gelu=True,
            folder=_rotary("GemmaForCausalLM", _NO_BIAS, defaults={"head_dim": 256, **_TIED}),
        ),
        Family(
            "phi3",  # arXiv:2404.14219
            "next",
            LLAMA,
            rotary=True,
            folder=_rotary(
                "Phi3ForCausalLM",
                {**_SILU, **_NO_BIAS},
                1e-5,
                refused={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "rope_scaling": None},
                same_as=_OWN_HEADS,
                window="sliding_window",
                written={"sliding_window": None},
                names=dict.fromkeys(
                    (f"self_attn.{name}_proj" for name in "qkv"), "self_attn.qkv_proj"
                )
                | dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
            ),
        ),
        Family(
            "gpt2",
            "next",
            "trainfleet.models.gpt2:GPT2",
            dropout=0.1,
            tanh=True,
            xla=True,
            folder=Folder(
                "GPT2LMHeadModel",
                _GPT2,
                {"activation_function": "gelu_new", **_PLAIN},
                refused=_PARTS,
                dropouts=("attn_pdrop", "embd_pdrop"),
                defaults=_TIED,
                four_times={"n_inner": "n_embd"},
                aliases={
                    _COMMON[ours]: _GPT2[ours]
                    for ours in ("hidden_size", "layers", "heads", "max_position_embeddings")
                },
                trunk="transformer",
                names=_GPT2_NAMES,
                turned=True,
                ignored=r"\.attn\.(masked_)?bias$",
            ),
        ),
        Family(
            "bert",
            "pairs",
            "trainfleet.models.bert:Bert",
            segments=2,
            dropout=0.1,
            norm_eps=1e-12,
            xla=True,
            slices=Slices(
                r"attention\.self\.(query|key|value)\.(weight|bias)$",
                r"attention\.output\.dense\.weight$",
                ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
                staged=False,
            ),
            folder=_encoder(
                "BertForPreTraining",
                {"type_vocab_size": 2},
                trunk="bert",
                heads={
                    "head.dense": "cls.predictions.transform.dense",
                    "head.norm": "cls.predictions.transform.LayerNorm",
                    "head.lm_head.weight": "cls.predictions.decoder.weight",
                    "head.lm_head.bias": "cls.predictions.bias",
                    "pooler.follows": "cls.seq_relationship",
                },
                ignored=r"position_ids$|^cls\.predictions\.decoder\.bias$",
            ),
        ),
        # Position 0 is row 2, because fairseq numbers positions from the row after the padding
        # token's row, 1.
        Family(
            "roberta",
            "masked",
            "trainfleet.models.bert:Encoder",
            positions_from=2,
            segments=1,
            dropout=0.1,
            xla=True,
            folder=_encoder(
                "RobertaForMaskedLM",
                {"type_vocab_size": 1, "pad_token_id": 1},
                trunk="roberta",
                heads={
                    "head.dense": "lm_head.dense",
                    "head.norm": "lm_head.layer_norm",
                    "head.lm_head.weight": "lm_head.decoder.weight",
                    "head.lm_head.bias": "lm_head.bias",
                },
                ignored=r"position_ids$|^lm_head\.decoder\.bias$|^roberta\.pooler\.",
            ),
        ),
    )
}
USUAL = next(iter(FAMILIES))  # default if the config sets neither a family nor a preset

FILE = Path(__file__).with_name("presets.yaml")


@dataclass(frozen=True)
class Preset:
    """Model shape.

    vocab_size defaults to the tokenizer's size, norm_eps and dropout default to the family's
    values, and head_dim to hidden_size / heads.
    """

    family: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    intermediate_size: int
    max_position_embeddings: int
    vocab_size: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float | None = None
    tie_word_embeddings: bool = False
    rope_scaling: float = 1.0
    dropout: float | None = None
    head_dim: int | None = None


PLAIN = ("tiny", "small")  # not from a paper; these dimensions work with any family
PRESETS = {name: Preset(**row) for name, row in read_table(FILE).items()}
