"""A model's shape as Hugging Face's config.json, both ways. Nothing is loaded for it: `make plan` reads one too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import door
from ..door import show
from ..errors import InputError
from ..shapes import fit
from . import schema
from .families import FAMILIES
from .presets import Preset
from .types import Model

CONFIG = "config.json"
LARGEST = door.MEBIBYTE  # of a config.json: published ones have a few KiB
Json = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """How a family writes its shape: which key each of our dimensions has there, and what must stand in the keys of others."""

    architecture: str
    keys: dict[str, str]
    fixed: Json = field(default_factory=dict)


_COMMON = {
    "vocabulary_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
_LLAMA = _COMMON | {"norm_epsilon": "rms_norm_eps", "kv_heads": "num_key_value_heads"}
_BERT = _COMMON | {"norm_epsilon": "layer_norm_eps", "dropout": "hidden_dropout_prob"}
_GPT2 = _COMMON | {
    "hidden_size": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "intermediate_size": "n_inner",
    "max_sequence_length": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
    "dropout": "resid_pdrop",
}
_PLAIN = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
_ENCODER = {"hidden_act": "gelu", "position_embedding_type": "absolute"}
FORMATS = {
    "llama": Format("LlamaForCausalLM", _LLAMA, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}),
    "mistral": Format("MistralForCausalLM", _LLAMA, {"hidden_act": "silu"}),
    "qwen2": Format("Qwen2ForCausalLM", _LLAMA, {"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": Format("Qwen3ForCausalLM", _LLAMA, {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}),
    "olmo2": Format("Olmo2ForCausalLM", _LLAMA, {"hidden_act": "silu", "attention_bias": False}),
    "gemma": Format("GemmaForCausalLM", _LLAMA, {"attention_bias": False}),
    "gpt2": Format("GPT2LMHeadModel", _GPT2, {"activation_function": "gelu_new", **_PLAIN}),
    "bert": Format("BertForPreTraining", _BERT, {**_ENCODER, "type_vocab_size": 2}),
    "roberta": Format("RobertaForMaskedLM", _BERT, {**_ENCODER, "type_vocab_size": 1, "pad_token_id": 1}),
}
# What no folder may ask for: it makes another function of the same weights, or other weights, in one version or another.
# None of it is written, as the value that stands here is the one that a missing key has.
_PARTS: Json = {"add_cross_attention": False, "pruned_heads": {}}
REFUSED: dict[str, Json] = {"gpt2": _PARTS, "bert": {"is_decoder": False, **_PARTS}, "roberta": {"is_decoder": False, **_PARTS}}
ROTARY_REFUSED: Json = {"partial_rotary_factor": 1.0}
GPT2_ALIASES = {  # under which transformers takes GPT-2's keys too, and before these
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
FULL_ATTENTION = "full_attention"
# A dropout of its own for attention and embeddings: ours is one for all.
OTHER_DROPOUTS = {"gpt2": ("attn_pdrop", "embd_pdrop"), "bert": ("attention_probs_dropout_prob",)}
OTHER_DROPOUTS["roberta"] = OTHER_DROPOUTS["bert"]
GELU = "gelu_pytorch_tanh"
ACTIVATIONS = ("hidden_act", "hidden_activation")  # older files have the first, in which gelu meant the same
STRETCHED = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def write(model: Model) -> Json:
    """The config.json of a shape, but for what is the tokenizer's: where `transformers` 4 has another name than 5, under both."""
    form, family = FORMATS[model.family], FAMILIES[model.family]
    content: Json = {"architectures": [form.architecture], "model_type": model.family}
    content |= {theirs: getattr(model, ours) for ours, theirs in form.keys.items()} | form.fixed
    content |= dict.fromkeys(OTHER_DROPOUTS.get(model.family, ()), model.dropout)
    if model.family == "roberta":
        content["max_position_embeddings"] += family.positions_from
    if family.rotary:
        stretched = STRETCHED | {"factor": model.rope_scaling} if model.rope_scaling != 1 else None
        content |= {"head_dim": model.head_features}
        content |= dict.fromkeys(("hidden_act", "hidden_activation"), GELU) if family.gelu else {}
        content |= {"sliding_window": None} if model.family == "mistral" else {}  # what was trained here saw whole sequences
        content["rope_parameters"] = (stretched or {"rope_type": "default"}) | {"rope_theta": model.rope_theta}
        content |= {"rope_theta": model.rope_theta, "rope_scaling": stretched}  # the names of versions before 5
    return content | {"dtype": "float32", "torch_dtype": "float32"}


def read(folder: Path) -> Preset:
    """The shape that a folder's config.json has, each number within what the config's own key allows.

    Raises:
        InputError: there is none, or it is of a model that is not built here; which key says so.
    """
    path = folder / CONFIG
    try:
        text = door.read_text(path, LARGEST)
        return _read(door.parse_json(text, str(path)))
    except FileNotFoundError as error:
        raise InputError(
            "there is no such file", where=str(path), next="model.preset: a known shape, or another folder"
        ) from error
    except InputError as error:
        where = error.where or f"{path}:{door.line_of(text, error.key)}"
        raise InputError(error.what, where=where, key=error.key) from error


def _read(content: Any) -> Preset:
    if not isinstance(content, dict):
        raise InputError(f"must be an object, not {show(content)}")
    family = content.get("model_type")
    if not isinstance(family, str) or family not in FORMATS:
        raise InputError(f"{show(family)} is not built; built: {', '.join(FORMATS)}", key="model_type")
    form, values = FORMATS[family], _defaults(content, family)
    if FAMILIES[family].gelu and (other := [key for key in ACTIVATIONS if content.get(key) not in (None, "gelu", GELU)]):
        raise InputError(f"{show(content[other[0]])} is not built for {family}: {show(GELU)} is", key=other[0])
    without = {key: value for key, value in REFUSED.get(family, ROTARY_REFUSED).items() if content.get(key) is not None}
    for key, value in (form.fixed | without).items():
        if content.get(key, value) != value:
            raise InputError(f"{show(content[key])} is not built for {family}: {show(value)} is", key=key)
    _one_attention(content)
    if missing := sorted(theirs for theirs in form.keys.values() if values.get(theirs) is None):
        raise InputError(f"lacks {', '.join(missing)}", key=missing[0])
    shape = {ours: values[theirs] for ours, theirs in form.keys.items()}
    if family == "roberta":
        shape["max_sequence_length"] = _whole(shape["max_sequence_length"]) - FAMILIES[family].positions_from
    for ours, theirs in form.keys.items():
        _check(ours, theirs, shape[ours])
    _one_dropout(content, family, shape.get("dropout"))
    return fit(Preset, {"family": family, "kv_heads": shape["heads"]} | shape | _rotary(content, family))


def _whole(value: Any) -> int:
    return value if type(value) is int else 0  # 0 is refused with the key that it is of


def _check(ours: str, theirs: str, value: Any) -> None:
    """InputError where a value is not what the key `model.<ours>` of a config takes."""
    for error in schema.validator(ours).iter_errors(value):
        raise InputError(next(schema.explain(error))[1], key=theirs)


def _one_attention(content: Json) -> None:
    kinds = content.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != FULL_ATTENTION for kind in kinds)):
        raise InputError(f"{show(kinds)} is not built: {show(FULL_ATTENTION)} in every layer is", key="layer_types")


def _one_dropout(content: Json, family: str, dropout: Any) -> None:
    for key in OTHER_DROPOUTS.get(family, ()):
        if content.get(key, dropout) != dropout:
            raise InputError(f"{show(content[key])}, where another dropout is {show(dropout)}; one for all is built", key=key)


def _defaults(content: Json, family: str) -> Json:
    """The file with what `transformers` takes where older files leave a key out."""
    values: Json = {"tie_word_embeddings": family == "gemma" or not FAMILIES[family].rotary} | content
    if family == "gpt2":
        values |= {name: content[alias] for alias, name in GPT2_ALIASES.items() if alias in content}
    if family in ("llama", "olmo2"):
        values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    if FAMILIES[family].rotary:
        values.setdefault("rms_norm_eps", 1e-5 if family == "olmo2" else 1e-6)
    if family == "mistral" and values.get("sliding_window") is not None:  # within it all is seen, as here
        values["max_position_embeddings"] = min(_whole(values[key]) for key in ("max_position_embeddings", "sliding_window"))
    if family == "gpt2" and values.get("n_inner") is None:
        values["n_inner"] = 4 * _whole(values.get("n_embd"))
    return values


def _rotary(content: Json, family: str) -> Json:
    """Base and stretch of the rotary embedding, from where files of either age have them."""
    if not FAMILIES[family].rotary:
        return {}
    # Of both, all versions of transformers take rope_scaling.
    name = "rope_parameters" if content.get("rope_scaling") in (None, {}) else "rope_scaling"
    scaling = {} if content.get(name) is None else content[name]
    if not isinstance(scaling, dict):
        raise InputError(f"must be an object, not {show(scaling)}", key=name)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    stretched: Json = {key: scaling.get(key) for key in STRETCHED if key != "rope_type"} if kind == "llama3" else {}
    if kind not in ("default", "llama3") or any(STRETCHED[key] != value for key, value in stretched.items()):
        raise InputError(f"{show(scaling)} is not built: Llama 3's is", key=name)
    size, heads = content["hidden_size"], content["num_attention_heads"]
    head = content.get("head_dim", 256 if family == "gemma" else 128 if family == "qwen3" else None)
    if head is not None:
        _check("head_size", "head_dim", head)
        if head % 2:
            raise InputError(f"{head} is odd, and the rotary embedding turns features in pairs", key="head_dim")
    own = None if head is None or head == size / heads else head
    theta = scaling.get("rope_theta", content.get("rope_theta", 10_000.0))
    factor = scaling.get("factor") if kind == "llama3" else 1.0
    _check("rope_theta", "rope_theta" if "rope_theta" not in scaling else f"{name}.rope_theta", theta)
    if theta is None or factor is None:
        raise InputError("is missing", key="rope_theta" if theta is None else f"{name}.factor")
    _check("rope_scaling", f"{name}.factor", factor)
    return {"rope_theta": float(theta), "rope_scaling": float(factor), "head_size": own}
