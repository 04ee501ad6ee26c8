"""Known shapes of models: every dimension that `model.preset` sets. Sources: the models' papers and published config.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    family: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    intermediate_size: int
    max_sequence_length: int
    vocabulary_size: int | None = None  # None: as large as the tokenizer
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False


PRESETS = {
    # Chosen by measurement: the lowest loss that two CPU cores reach in about two minutes (tests/bench/LOG.md).
    "tiny": Preset("llama", 4, 256, 8, 8, 704, 1024, tie_embeddings=True),
    "small": Preset("llama", 6, 384, 6, 6, 1024, 2048),
    # Touvron et al. 2023, arXiv:2307.09288
    "llama-2-7b": Preset("llama", 32, 4096, 32, 32, 11008, 4096, 32000),
    "llama-2-13b": Preset("llama", 40, 5120, 40, 40, 13824, 4096, 32000),
    "llama-2-70b": Preset("llama", 80, 8192, 64, 8, 28672, 4096, 32000),
    # Grattafiori et al. 2024, arXiv:2407.21783
    "llama-3-8b": Preset("llama", 32, 4096, 32, 8, 14336, 8192, 128256, rope_theta=500_000.0),
    "llama-3-70b": Preset("llama", 80, 8192, 64, 8, 28672, 8192, 128256, rope_theta=500_000.0),
}
