"""A Hugging Face folder that somebody else made ends in weights or in an error that names the file, whatever its bytes are."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_foreign_checkpoints import OLD, mutate

from trainfleet import models
from trainfleet.config import load_resolved, weight_files
from trainfleet.config.types import Model
from trainfleet.models import huggingface_weights
from trainfleet.trust.errors import TrainfleetError

SHAPE: Model = load_resolved(OLD / "config.yaml").model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert huggingface_weights.save(models.build(SHAPE), SHAPE.family, tmp_path) == [
        huggingface_weights.WEIGHTS
    ]
    return tmp_path


def load(folder: Path) -> dict[str, torch.Tensor]:
    return huggingface_weights.load(
        folder, SHAPE, huggingface_weights.sizes_of(models.build(SHAPE).named_parameters())
    )


def refusal(folder: Path) -> str:
    with pytest.raises(TrainfleetError) as caught:
        load(folder)
    return str(caught.value)


def plan_says(folder: Path) -> str:
    """What is told of a folder before ranks start."""
    with pytest.raises(TrainfleetError) as caught:
        weight_files.require(folder, SHAPE)
    return str(caught.value)


def test_changed_weights_end_in_an_error_or_in_numbers(folder: Path) -> None:
    draw, path = random.Random(3), folder / huggingface_weights.WEIGHTS
    whole, refused = path.read_bytes(), 0
    assert load(folder)
    weight_files.require(folder, SHAPE)
    head = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(int(os.environ.get("FUZZ", "300"))):
        path.write_bytes(
            mutate(whole[:head], draw) + whole[head:]
            if draw.random() < 0.8
            else mutate(whole, draw)
        )
        try:
            load(folder)
        except TrainfleetError as error:
            assert error.where and error.next
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("header", [2**63, 2**40, 10**8 + 1, 0], ids=str)
def test_a_header_that_is_larger_than_its_file_takes_no_memory(folder: Path, header: int) -> None:
    (folder / huggingface_weights.WEIGHTS).write_bytes(struct.pack("<Q", header) + b"{}")
    assert "can't be read as safetensors" in refusal(folder)
    assert "can't be read as safetensors" in plan_says(folder)


def test_weights_are_plain_files_of_floating_point_numbers(folder: Path) -> None:
    path = folder / huggingface_weights.WEIGHTS
    tensors = load_file(path)
    save_file({name: tensor.to(torch.int8) for name, tensor in tensors.items()}, path)
    assert "a weight with the wrong type or shape" in refusal(folder) and "is I8" in plan_says(
        folder
    )
    save_file({name: tensor[None] for name, tensor in tensors.items()}, path)
    assert "a weight with the wrong type or shape" in refusal(folder)
    path.unlink()
    os.mkfifo(path)
    assert str(path) in refusal(folder)


@pytest.mark.parametrize(
    "name",
    ["../victim.safetensors", "/etc/passwd", "a/../../b", "", "..", "a\n", 7, None, ["x"]],
    ids=repr,
)
def test_an_index_names_files_of_its_folder_alone(folder: Path, name: object) -> None:
    path = folder / huggingface_weights.WEIGHTS
    (folder.parent / "victim.safetensors").write_bytes(path.read_bytes())
    path.unlink()
    (folder / huggingface_weights.INDEX).write_text(
        json.dumps({"weight_map": {"model.norm.weight": name}})
    )
    assert str(folder) in refusal(folder) and str(folder) in plan_says(folder)
