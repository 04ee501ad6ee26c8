"""Model families (`model.family`) and presets (`model.preset`).

Each row of families.yaml defines an architecture, its module and its Hugging Face format.
presets.yaml lists published shapes with their sources. No other module may branch on a family's
name. Both the control plane and the node plane import this module, so it imports no model code:
`module` is only a dotted name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..trust.validation import fit_row
from .tables import read_table

# Fraction of tokens that masked models predict (Devlin et al. 2018, arXiv:1810.04805, section 3.1).
MASKED = 0.15
Json = Mapping[str, Any]
NONE: Json = {}


# A NamedTuple, because every verb imports this class, and creating a dataclass is six times slower.
class Folder(NamedTuple):
    """A family's Hugging Face format.

    Attributes up to `window` describe config.json (config/huggingface_config.py), and the others
    the weights (models/huggingface_weights.py).

    Attributes:
        architecture: Value of `architectures`.
        keys: Maps our dimensions to config.json keys.
        fixed: Other keys and their required values.
        written: Additional keys to write.
        refused: Keys that must be absent or have this value, because other values may change what
            the model computes or its weights. They are not written.
        dropouts: Additional dropout keys, which must all equal the one rate.
        defaults: Values that `transformers` assumes for keys that older files omit.
        same_as: Maps a key that older files omit to the key that supplies its value.
        four_times: Maps a key that older files omit to the key with a quarter of its value.
        aliases: Maps alternative names, which take precedence, to keys.
        window: Key of the attention window, which limits the sequence length.
        trunk: Prefix of all weight names except `heads`.
        names: Maps our weight names to theirs inside the trunk. Matrices that share a name there
            are concatenated.
        own: Pattern for weight names that are the same in both.
        heads: Maps our weight names to theirs outside the trunk.
        turned: Whether matrices are transposed.
        ignored: Pattern for weights that are reported and skipped: buffers of older versions, tied
            copies and an untrained head.
    """

    architecture: str
    keys: Mapping[str, str]
    fixed: Json = NONE
    written: Json = NONE
    refused: Json = NONE
    dropouts: Sequence[str] = ()
    defaults: Json = NONE
    same_as: Mapping[str, str] = NONE
    four_times: Mapping[str, str] = NONE
    aliases: Mapping[str, str] = NONE
    window: str = ""
    trunk: str = "model"
    names: Mapping[str, str] = NONE
    own: str = ""
    heads: Mapping[str, str] = {"lm_head": "lm_head"}
    turned: bool = False
    ignored: str = r"rotary_emb\.inv_freq$"


class Slices(NamedTuple):
    """Sharding of a family's weights in AWS's NxD Core examples (the nxd platform).

    Key/value heads are replicated if there are fewer of them than tensor ranks.

    Attributes:
        column: Pattern for column-parallel matrices, which are split by output features.
        row: Pattern for row-parallel matrices, which are split by input features.
        tied: The two names of the tied tensor.
        fused: Whether gate and up projections are one tensor, and query, key and value another.
        staged: Whether the model supports pipeline stages.
    """

    column: str
    row: str
    tied: Sequence[str]
    fused: bool = False
    staged: bool = True


@dataclass(frozen=True)
class Family:
    """Model architecture.

    The flags from `biases` to `gelu` distinguish decoders with rotary embeddings.

    Attributes:
        objective: next (predict the next token), masked (predict masked tokens) or pairs (predict
            masked tokens, and whether text B follows text A).
        module: Dotted name of the network.
        rotary: Whether positions use rotary embeddings instead of learned ones.
        positions_from: Row of position 0 in the learned position embedding.
        biases: Whether query, key and value have biases.
        normed: Whether query and key are normalized per "head", over "all" heads, or not at all
            ("").
        normed_after: Whether a block normalizes its modules' outputs instead of their inputs.
        gains_from_one: Whether a norm's gain is its weight plus 1.
        scaled: Whether embeddings are multiplied by the square root of their width.
        gelu: Whether GELU replaces SiLU.
        tanh: Whether GELU uses the tanh approximation.
        xla: Whether engine/parallel can build the model from NxD Core's layers.
        slices: Sharding in AWS's examples, or None if they don't cover this family.
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
        """Returns whether `transformers` supports Llama 3.1's position scaling for this family."""
        return self.rotary and "rope_scaling" not in self.folder.refused

    @property
    def copies_heads(self) -> bool:
        """Returns whether NxD Core can replicate a key/value head across tensor ranks."""
        return self.xla and self.rotary

    def guesses(self, sequence_length: int) -> int:
        """Returns the number of predicted tokens per sequence, over which the loss is averaged.

        It is the same for every sequence, so a mean of means is exact.
        """
        return sequence_length if self.causal else max(1, round(MASKED * sequence_length))


def _family(name: str, row: dict[str, Any]) -> Family:
    slices, folder = row.pop("slices", None), Folder(**row.pop("folder"))
    return Family(name, **row, folder=folder, slices=slices and Slices(**slices))


HERE = Path(__file__)
_ROWS = read_table(HERE.with_name("families.yaml"))["families"]
FAMILIES = {name: _family(name, row) for name, row in _ROWS.items()}
USUAL = next(iter(FAMILIES))  # default if the config sets neither a family nor a preset


@dataclass(frozen=True)
class Preset:
    """Model shape.

    vocab_size defaults to the tokenizer's size, norm_eps and dropout to the family's values, and
    head_dim to hidden_size / heads.
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


PLAIN = ("tiny", "small")  # made-up shapes that work with any family
SHAPES = HERE.with_name("presets.yaml")
PRESETS = {
    name: fit_row(Preset, row, SHAPES, f"{name}:") for name, row in read_table(SHAPES).items()
}
