"""Our folders in two versions of `transformers`, and theirs here: each family with random shapes, both ways.

5 is the test environment's own; 4.51, which AWS's NxD Core pins, is beside it (transformers4.txt), on the same torch.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from requirement import missing, need
from trainfleet import models
from trainfleet.config import huggingface_config as shapes
from trainfleet.config.families import FAMILIES, Preset
from trainfleet.config.types import Model
from trainfleet.models import huggingface_weights
from trainfleet.trust.errors import InputError

ROOT = Path(__file__).parents[2]
OLDER = Path(os.environ.get("TRANSFORMERS4", ROOT / ".venv-transformers4"))
VERSIONS = ("4.51", "5")
WITHOUT_STRETCH = {("olmo2", "4.51")}  # which says so: its OLMo 2 takes no rope of Llama 3's kind
NEAR = 5e-6  # of the largest logit, or of 1
LONG, SHORT = 1_200, 40  # tokens: a stretched rope shows at late positions alone
ENOUGH_FOR_STRETCH = 131_072


def judge(version: str, *words: str) -> str:
    """What a version's judge prints of a command; it fails where the judge does."""
    path = ""
    if version == VERSIONS[0]:
        path = str(OLDER)
        if not (OLDER / "transformers").is_dir():
            missing(
                f"no {OLDER}; .venv/bin/python -m pip install --no-deps --target .venv-transformers4 -r tests/oracles/transformers4.txt"
            )
    else:
        need("transformers")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("transformers_judge.py")), *words],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))


def exported(version: str, count: int, folder: Path) -> list[str]:
    """What is wrong with `count` of our models a family, exported and loaded by a version."""
    made = {}
    for family in FAMILIES:
        draw = random.Random(f"{family} {version}")
        for number in range(count):
            stretches = FAMILIES[family].rotary and (family, version) not in WITHOUT_STRETCH
            model = shaken(random_shape(family, draw, number, stretches), number)
            made[f"{family}-{number}"] = write(model, folder / f"{family}-{number}"), model.shape
    told = judge(version, "load", str(folder)).splitlines()
    for name, (logits, shape) in made.items():
        if (apart := far(logits, load_file(folder / name / "theirs.safetensors")["logits"])) > NEAR:
            told.append(f"{name}: {apart:.1e} apart, {shape}")
    return told


def imported(version: str, count: int, folder: Path) -> list[str]:
    """What is wrong with `count` models a family that a version saved and that are loaded here."""
    judge(version, "make", str(folder), str(count))
    told = []
    for case in sorted(folder.iterdir()):
        shape = shape_of(shapes.read(case))
        model = models.build(shape)
        model.load_state_dict(
            huggingface_weights.load(
                case, shape, huggingface_weights.sizes_of(model.named_parameters())
            ),
            strict=False,
        )
        with torch.no_grad():
            logits = model.eval()(load_file(case / "inputs.safetensors")["tokens"])
        if (apart := far(logits, load_file(case / "theirs.safetensors")["logits"])) > NEAR:
            told.append(f"{case.name}: {apart:.1e} apart, {shape}")
    return told


# 4.51's masks have Qwen's window also where `use_sliding_window`, which is refused, says that there is none.
MISTAKEN = {("4.51", "qwen2", "sliding_window"), ("4.51", "qwen3", "sliding_window")}


def unseen_keys(version: str, folder: Path) -> list[str]:
    """The keys of config.json that make another function of a model in a version, and here neither another shape nor an error."""
    judge(version, "keys", str(folder))
    told = []
    for family in sorted(folder.iterdir()):
        plain = read(json.loads((family / "base.json").read_text()), folder)
        assert plain is not None, f"{family.name}: the plain one is refused"
        changed = [json.loads(path.read_text()) for path in sorted(family.glob("[0-9]*.json"))]
        assert len(changed) > len(fields(Preset)) / 2, (
            f"{family.name}: {len(changed)} keys were found"
        )
        told += [f"{family.name}: {each['key']} {each['value']!r}" for each in changed
                 if (version, family.name, each["key"]) not in MISTAKEN and read(each["config"], folder) == plain]  # fmt: skip
    return told


def read(content: dict[str, Any], folder: Path) -> Preset | None:
    """The shape of a config.json, or None where it is refused."""
    (folder / "config.json").write_text(json.dumps(content))
    try:
        return shapes.read(folder)
    except InputError:
        return None
    finally:
        (folder / "config.json").unlink()


def random_shape(family: str, draw: random.Random, number: int, stretches: bool) -> Model:
    """A shape that a config may ask for: every other one with its head tied to its embedding, and half of all ropes stretched."""
    facts, heads, features = FAMILIES[family], draw.choice([2, 4, 6]), draw.choice([8, 12, 16])
    scaling = draw.choice([1.0, 1.0, 8.0, 32.0]) if stretches and facts.scalable else 1.0
    wide = facts.rotary and family not in ("qwen2", "olmo2", "phi3") and draw.random() < 0.5
    return Model(
        "test", family, draw.choice([1, 2, 3]), 48 if wide else heads * features, heads,
        draw.choice([each for each in range(1, heads + 1) if heads % each == 0]) if facts.rotary else heads,
        draw.choice([40, 96, 130]), draw.choice([64, 100, 257]), draw.choice([64, 128]) if scaling == 1 else ENOUGH_FOR_STRETCH,
        draw.choice([1e4, 5e5, 1e6]) if facts.rotary else 1e4, draw.choice([1e-5, 1e-6]), number % 2 == 0, rope_scaling=scaling,
        head_dim=features if wide else None,
    )  # fmt: skip


def shaken(shape: Model, seed: int) -> models.Network:
    """A model far from its first weights: no bias is 0, no gain is 1."""
    model, generator = models.build(shape), torch.Generator().manual_seed(seed)
    model.initialize(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model.eval()


def write(model: models.Network, folder: Path) -> torch.Tensor:
    """An export with inputs beside it; the logits that it must give."""
    folder.mkdir(parents=True)
    shape = model.shape
    (folder / "config.json").write_text(json.dumps({"pad_token_id": None} | shapes.write(shape)))
    huggingface_weights.save(model, shape.family, folder)
    count = LONG if shape.rope_scaling != 1 else SHORT
    tokens = torch.randint(
        3, shape.vocab_size, (1, count), generator=torch.Generator().manual_seed(count)
    )
    tokens = (
        torch.stack((tokens, torch.arange(count)[None] % 2), -1)
        if shape.family == "bert"
        else tokens
    )
    save_file({"tokens": tokens}, folder / "inputs.safetensors")
    with torch.no_grad():
        return model(tokens)  # type: ignore[no-any-return]


def shape_of(preset: Preset) -> Model:
    family = FAMILIES[preset.family]
    keys = {key: value for key, value in asdict(preset).items() if value is not None}
    return Model(preset=None, **{"norm_eps": family.norm_eps} | keys | {"dropout": 0.0})
