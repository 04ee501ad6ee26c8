"""Known shapes of models: every dimension that `model.preset` sets (presets.yaml, with its
sources).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .tables import read_table

FILE = Path(__file__).with_name("presets.yaml")


@dataclass(frozen=True)
class Preset:
    """None: as large as the tokenizer (vocabulary), as many as heads (kv_heads), or what the family
    takes.
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


PLAIN = ("tiny", "small")  # of nobody's paper: any family may have their dimensions
PRESETS = {name: Preset(**row) for name, row in read_table(FILE).items()}
