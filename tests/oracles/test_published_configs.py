"""Public models' config.json beside transformers, which reads the same file and builds the same model without its weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers_versions import shape_of

from requirement import need
from trainfleet import models
from trainfleet.config import huggingface_config as shapes
from trainfleet.config.families import FAMILIES
from trainfleet.config.weight_files import BIASES
from trainfleet.models.huggingface_weights import counterpart_of
from trainfleet.models.llama import rotary_table

FILE = Path(__file__).with_name("published_configs.yaml")
PUBLISHED: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())
EACH = pytest.mark.parametrize("name", PUBLISHED)
POSITIONS = torch.tensor([0, 1, 7, 100, 2_047, 5_000])
Facts = dict[str, object]


def written(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def ours(folder: Path) -> Facts:
    """What we make of a folder's config.json, under their names."""
    shape = shape_of(shapes.read(folder))
    with torch.device("meta"):
        model = models.build(shape)
    sizes = dict[str, tuple[int, ...]]()
    for name, parameter in model.named_parameters():
        there, size = counterpart_of(shape.family, name), tuple(parameter.shape)
        joined = sizes.get(there.name, (0,) * len(size))  # query, key and value side by side
        size = (joined[-1 if there.turned else 0] + size[0], *size[1:])
        sizes[there.name] = size[::-1] if there.turned else size
    return {"sizes": sizes, "turns": turned(*rotary_table(shape, POSITIONS)) if FAMILIES[shape.family].rotary else None,
            "epsilons": {shape.norm_eps}, "heads": (shape.heads, shape.kv_heads, shape.head_features),
            "tied": shape.tie_word_embeddings, "length": shape.max_position_embeddings, "vocabulary": shape.vocab_size}  # fmt: skip


def theirs(folder: Path) -> Facts:
    """What transformers makes of it."""
    transformers = need("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    family = FAMILIES[config.model_type]
    kind = getattr(transformers, family.folder.architecture)
    with torch.device("meta"):
        model = kind(config)
    again = {other: name for name, other in BIASES.items()}
    sizes = {
        again.get(name, name): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
    }
    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    epsilons = {getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) for norm in norms}
    turns = None
    if family.rotary:
        rotary = getattr(
            sys.modules[kind.__module__], kind.__name__.replace("ForCausalLM", "RotaryEmbedding")
        )(config)
        turns = turned(*(part[0] for part in rotary(torch.zeros(1), POSITIONS[None])))
    heads = config.num_attention_heads
    features = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, family.folder.window or "-", None)
    longest = min(config.max_position_embeddings - family.positions_from, window or 10**9)
    return {"sizes": sizes, "turns": turns, "epsilons": epsilons, "heads": (heads, getattr(config, "num_key_value_heads", heads), features),
            "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
            "length": longest, "vocabulary": config.vocab_size}  # fmt: skip


def turned(cos: torch.Tensor, sin: torch.Tensor) -> list[float]:
    return torch.stack((cos, sin)).double().round(decimals=6).flatten().tolist()  # type: ignore[no-any-return]


@EACH
def test_a_public_model_is_what_transformers_makes_of_it(name: str, tmp_path: Path) -> None:
    """Every parameter's size, the rotation of late positions, epsilon, heads, ties, length and vocabulary."""
    folder = written(tmp_path, PUBLISHED[name]["config"])
    mine, judged = ours(folder), theirs(folder)
    assert mine.pop("turns") == pytest.approx(judged.pop("turns"), abs=2e-6)
    assert mine == judged


@EACH
def test_each_of_its_keys_is_gone_by_or_changes_nothing_there(name: str, tmp_path: Path) -> None:
    content = PUBLISHED[name]["config"]
    whole, unused = theirs(written(tmp_path, content)), shapes.unused(tmp_path)
    assert unused and "licence" in PUBLISHED[name]
    assert (
        theirs(
            written(tmp_path, {key: value for key, value in content.items() if key not in unused})
        )
        == whole
    )


def test_every_family_with_published_models_is_judged() -> None:
    assert {row["config"]["model_type"] for row in PUBLISHED.values()} == set(FAMILIES)
