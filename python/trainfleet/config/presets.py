"""Known shapes of models: every dimension that `model.preset` sets. Sources: the models' papers and published config.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """None: as large as the tokenizer (vocabulary), as many as heads (kv_heads), or what the family takes."""

    family: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    intermediate_size: int
    max_sequence_length: int
    vocabulary_size: int | None = None
    rope_theta: float = 10_000.0
    norm_epsilon: float | None = None
    tie_embeddings: bool = False
    rope_scaling: float = 1.0
    dropout: float | None = None
    head_size: int | None = None


def _gpt2(layers: int, hidden_size: int, heads: int) -> Preset:
    return Preset("gpt2", layers, hidden_size, heads, heads, 4 * hidden_size, 1024, 50257, tie_embeddings=True)


def _encoder(family: str, layers: int, hidden_size: int, heads: int, vocabulary_size: int) -> Preset:
    return Preset(family, layers, hidden_size, heads, heads, 4 * hidden_size, 512, vocabulary_size, tie_embeddings=True)


PLAIN = ("tiny", "small")  # of nobody's paper: any family may have their dimensions
PRESETS = {
    # Chosen by measurement: the lowest loss that two CPU cores reach in about two minutes (tests/bench/LOG.md).
    "tiny": Preset("llama", 4, 128, 2, 2, 384, 1024, tie_embeddings=True),
    "small": Preset("llama", 6, 384, 6, 6, 1024, 2048),
    # Touvron et al. 2023, arXiv:2307.09288
    "llama-2-7b": Preset("llama", 32, 4096, 32, 32, 11008, 4096, 32000),
    "llama-2-13b": Preset("llama", 40, 5120, 40, 40, 13824, 4096, 32000),
    "llama-2-70b": Preset("llama", 80, 8192, 64, 8, 28672, 4096, 32000),
    # Grattafiori et al. 2024, arXiv:2407.21783; 3.2's from their published config.json
    "llama-3-8b": Preset("llama", 32, 4096, 32, 8, 14336, 8192, 128256, 500_000.0),
    "llama-3-70b": Preset("llama", 80, 8192, 64, 8, 28672, 8192, 128256, 500_000.0),
    "llama-3.2-1b": Preset("llama", 16, 2048, 32, 8, 8192, 131072, 128256, 500_000.0, tie_embeddings=True, rope_scaling=32.0),
    "llama-3.2-3b": Preset("llama", 28, 3072, 24, 8, 8192, 131072, 128256, 500_000.0, tie_embeddings=True, rope_scaling=32.0),
    # From their published config.json
    "mistral-7b": Preset("mistral", 32, 4096, 32, 8, 14336, 32768, 32768, 1e6, 1e-5),
    "qwen2.5-0.5b": Preset("qwen2", 24, 896, 14, 2, 4864, 32768, 151936, 1e6, tie_embeddings=True),
    "qwen2.5-7b": Preset("qwen2", 28, 3584, 28, 4, 18944, 131072, 152064, 1e6),
    "qwen3-0.6b": Preset("qwen3", 28, 1024, 16, 8, 3072, 40960, 151936, 1e6, tie_embeddings=True, head_size=128),
    "qwen3-8b": Preset("qwen3", 36, 4096, 32, 8, 12288, 40960, 151936, 1e6, head_size=128),
    "olmo2-7b": Preset("olmo2", 32, 4096, 32, 32, 11008, 4096, 100352, 500_000.0),
    "gemma-2b": Preset("gemma", 18, 2048, 8, 1, 16384, 8192, 256000, tie_embeddings=True, head_size=256),
    # Radford et al. 2019, table 2
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    # Devlin et al. 2018, arXiv:1810.04805; Liu et al. 2019, arXiv:1907.11692
    "bert-base": _encoder("bert", 12, 768, 12, 30522),
    "bert-large": _encoder("bert", 24, 1024, 16, 30522),
    "roberta-base": _encoder("roberta", 12, 768, 12, 50265),
    "roberta-large": _encoder("roberta", 24, 1024, 16, 50265),
}
