"""Converts a model's weights to and from the format of AWS's examples for NxD Core, and reads and
writes its checkpoints, without NxD Core. `folder` describes their files.

The format uses Hugging Face's names, and divides weights into tensor-parallel slices and pipeline
stages. Llama's query, key and value are fused, and so are its gate and up projections.

If there are fewer key-value heads than tensor ranks, several ranks hold a copy of each head. The
query heads then follow their key-value heads in Trn1's order.

Source: github.com/aws-neuron/neuronx-distributed fbac349:
examples/training/llama/modeling_llama_nxd.py and tp_dp_bert_hf_pretrain,
scripts/checkpoint_converter.py; trainer/checkpoint.py for save_checkpoint.

A checkpoint may also contain `optim`, `scheduler.pt` and `user_content.pt`, which a new run does
not use. NxD reads the files with weights_only=False, which executes code in them. This module uses
weights_only=True.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainfleet.config.families import FAMILIES, Slices
from trainfleet.config.types import Model
from trainfleet.engine.checkpoint.files import NAMES
from trainfleet.models import huggingface_weights
from trainfleet.trust.errors import RunError

from .folder import BEGUN, DONE, MODEL, name_of, require_all, require_plain, unreadable

Names = dict[str, Tensor]
LAYER = re.compile(r"\.layers?\.(\d+)\.")
# one tensor with two names, as in transformers
BESIDE = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
# Maximum difference between copies of a head, as a fraction of the norm. Copies differ only by
# stochastic rounding, whereas different heads differ far more.
COPIES_DIFFER = 0.1


@dataclass(frozen=True)
class Degrees:
    """Degrees of tensor and pipeline parallelism."""

    tensor: int
    pipeline: int

    def __str__(self) -> str:
        return f"TP {self.tensor}, PP {self.pipeline}"


def slices_of(shape: Model) -> Slices:
    """Returns the slicing rules of AWS's example for the model's family.

    Mistral uses Llama's example.
    """
    found = FAMILIES[shape.family].slices
    assert found is not None, f"{shape.family}: call refusal first"
    return found


def refusal(shape: Model, degrees: Degrees) -> str:
    """Returns why a model can't be divided by these degrees, or "" if it can."""
    tensor = degrees.tensor
    slices = FAMILIES[shape.family].slices
    if slices is None:
        have = [family.name for family in FAMILIES.values() if family.slices]
        return f"AWS's examples for NxD Core have no {shape.family}, only {', '.join(have)}"
    if not slices.staged and degrees.pipeline > 1:
        return f"AWS's {shape.family.upper()} for NxD Core has no pipeline stages"
    if degrees.pipeline > shape.layers:
        return f"{shape.layers} layers are too few for {degrees.pipeline} pipeline stages"
    divided = {"heads": shape.heads}
    if slices.fused:
        divided |= {
            "vocab_size": shape.vocab_size,
            "intermediate_size": shape.intermediate_size,
        }
        if max(tensor, shape.kv_heads) % min(tensor, shape.kv_heads):
            return (
                f"model.kv_heads is {shape.kv_heads}, not a multiple or a divisor of the {tensor} "
                "tensor ranks"
            )
    return next(
        (
            f"model.{name} is {size}, not divisible by {tensor} tensor ranks"
            for name, size in divided.items()
            if size % tensor
        ),
        "",
    )


def divide(whole: Names, shape: Model, degrees: Degrees) -> Callable[[int, int], Names]:
    """Returns a function that maps a (tensor rank, stage) to its weights.

    The weights have Hugging Face's names and are in module order.
    """
    slices, size = slices_of(shape), degrees.tensor
    named = dict(whole)
    for mine, theirs in (slices.tied, *BESIDE.items()):
        if theirs in named:
            named.setdefault(mine, named[theirs])

    def part(rank: int, stage: int) -> Names:
        found = {
            name: cut(name, value, shape, rank, size)
            for name, value in named.items()
            if stage_of(name, shape, degrees.pipeline) == stage
        }
        return fuse(found, shape, size) if slices.fused else found

    return part


def stage_of(name: str, shape: Model, stages: int) -> int:
    """Returns a weight's stage in NxD's even split.

    If the layers do not divide evenly, each of the last stages has one more layer.
    """
    layer = LAYER.search(name)
    if not layer:
        return 0 if "embed" in name else stages - 1
    least, more = divmod(shape.layers, stages)
    ends = [
        sum(least + (each >= stages - more) for each in range(stage + 1)) for stage in range(stages)
    ]
    return next(stage for stage, end in enumerate(ends) if int(layer[1]) < end)


def cut(name: str, value: Tensor, shape: Model, rank: int, size: int) -> Tensor:
    """Returns a tensor rank's slice of a weight."""
    slices, copies = slices_of(shape), max(1, size // shape.kv_heads)
    if slices.fused and copies > 1:
        if re.search(r"[kv]_proj\.", name):
            return value.chunk(shape.kv_heads)[rank % shape.kv_heads].clone()
        if re.search(r"[qo]_proj\.", name):
            return value.chunk(size, 1 if "o_proj" in name else 0)[
                order(shape.kv_heads, copies)[rank]
            ].clone()
    if re.search(slices.column, name):
        return value.chunk(size, 0)[rank].clone()
    return value.chunk(size, 1)[rank].contiguous().clone() if re.search(slices.row, name) else value


def order(heads: int, copies: int) -> list[int]:
    """Returns each tensor rank's group of query heads on Trn1.

    On Trn1, key-value heads alternate across the ranks: 0, 1, 0, 1.
    """
    return [head * copies + copy for copy in range(copies) for head in range(heads)]


def fuse(found: Names, shape: Model, size: int) -> Names:
    """Fuses the gate and up projections.

    Also fuses query, key and value if AWS's example does.
    """
    together: dict[str, tuple[str, ...]] = {
        "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    }
    triple = tuple(f"self_attn.{each}_proj.weight" for each in "qkv")
    if size > shape.kv_heads:
        together["self_attn.qkv_proj.weight_qkv"] = triple
    elif shape.heads == shape.kv_heads:
        together["self_attn.qkv_proj.weight"] = triple
    for fused, parts in together.items():
        for name in [name for name in found if name.endswith(parts[0])]:
            prefix = name.removesuffix(parts[0])
            found[prefix + fused] = torch.cat([found.pop(prefix + each) for each in parts])
    return found


class Whole:
    """Joined slices of all tensor ranks, by Hugging Face's names.

    Provides the interface that `huggingface_weights.load` requires.
    """

    def __init__(
        self, ranks: Sequence[Mapping[str, StoredTensor]], shape: Model, where: str
    ) -> None:
        """Joins `ranks`, which contains each tensor rank's weights from all stages."""
        self.ranks, self.shape, self.where = ranks, shape, where
        self.sources = {name: (key, pick) for key in ranks[0] for name, pick in parts_of(key)}

    def keys(self) -> list[str]:
        return list(self.sources)

    def get_slice(self, name: str) -> StoredTensor:
        key, _ = self.sources[name]
        if missing := [rank for rank, found in enumerate(self.ranks) if key not in found]:
            raise RunError(
                f"lacks {key} of tensor rank {missing[0]}",
                where=self.where,
                next="copy the checkpoint again",
            )
        return self.ranks[0][key]

    def get_tensor(self, name: str) -> Tensor:
        key, pick = self.sources[name]
        try:
            return self._join(
                name, [pick(rank[key].read(), self.shape, len(self.ranks)) for rank in self.ranks]
            )
        except (ValueError, RuntimeError, IndexError) as error:
            raise RunError(
                f"{key} does not match the model",
                where=self.where,
                why=str(error),
                next="set model.* in the config to the checkpoint's values",
            ) from error

    def _join(self, name: str, slices: list[Tensor]) -> Tensor:
        how, heads = slices_of(self.shape), self.shape.kv_heads
        copies = max(1, len(slices) // heads)
        if how.fused and re.search(r"[kv]_proj\.", name):
            return once(torch.cat(slices), copies, name)
        if how.fused and copies > 1 and re.search(r"[qo]_proj\.", name):
            slices = [slices[order(heads, copies).index(group)] for group in range(len(slices))]
        if re.search(how.column, name):
            return torch.cat(slices, 0)
        return torch.cat(slices, 1) if re.search(how.row, name) else slices[0]


Pick = Callable[[Tensor, Model, int], Tensor]


def parts_of(key: str) -> list[tuple[str, Pick]]:
    """Returns the Hugging Face names of the weights stored under a key.

    Each name comes with a function that extracts its weight from a rank's slice.
    """
    prefix, attention, last = key.rpartition("self_attn.qkv_proj.")
    if attention and last in ("weight_qkv", "weight"):
        return [
            (f"{prefix}self_attn.{each}_proj.weight", partial(third, index))
            for index, each in enumerate("qkv")
        ]
    if attention and last in ("weight_q", "weight_k", "weight_v"):
        return [(f"{prefix}self_attn.{last[-1]}_proj.weight", alone)]
    prefix, both, _ = key.rpartition("mlp.gate_up_proj.weight")
    return (
        [
            (f"{prefix}mlp.{each}_proj.weight", partial(half, index))
            for index, each in enumerate(("gate", "up"))
        ]
        if both
        else [(key, alone)]
    )


def alone(value: Tensor, shape: Model, ranks: int) -> Tensor:
    return value


def half(index: int, value: Tensor, shape: Model, ranks: int) -> Tensor:
    return value.chunk(2)[index]


def third(index: int, value: Tensor, shape: Model, ranks: int) -> Tensor:
    """Extracts query, key or value from a fused slice.

    Their sizes differ if several query heads share a key-value head.
    """
    heads = max(1, shape.kv_heads // ranks) * shape.head_features
    return torch.split(value, [shape.heads // ranks * shape.head_features, heads, heads])[index]


def once(all_copies: Tensor, copies: int, name: str) -> Tensor:
    """Returns the first copy of repeated key-value heads, as NxD's converter does.

    Raises:
        ValueError: the copies differ.
    """
    first, *others = all_copies.chunk(copies)
    if any(
        (other.float() - first.float()).norm() > COPIES_DIFFER * first.float().norm()
        for other in others
    ):
        raise ValueError(f"the copies of {name} are not in Trn1's order")
    return first


TAG = "pretrained_weight"  # tag from which AWS's Llama trainer loads initial weights


def load(tag: Path, shape: Model, sizes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Loads the weights listed in `sizes` from a checkpoint, under trainfleet's names.

    Has the same interface as `huggingface_weights.load`.

    Raises:
        RunError: a file or weight is missing, unused or of a different size. The message names it.
    """
    if why := refusal(shape, Degrees(1, 1)):
        raise RunError(
            "can't be loaded as an NxD checkpoint",
            where=str(tag),
            why=why,
            next="set train.init_from to a Hugging Face folder",
        )
    files = require_all(tag)
    ranks: list[dict[str, StoredTensor]] = [{} for _ in range(1 + max(rank for rank, _ in files))]
    for (rank, _), path in sorted(files.items()):
        content = content_of(path)
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor | TensorReference)
            for name, value in content.items()
        ):
            raise unreadable(path, "it does not contain named weights")
        ranks[rank] |= {name: StoredTensor(path, name, value) for name, value in content.items()}
    return huggingface_weights.collect([Whole(ranks, shape, str(tag))], tag, shape, sizes)


class TensorReference:
    """Reference to a tensor in a separate file.

    Substitutes for torch_xla's class, so that torch_xla need not be installed.
    """

    tid: object = None


def content_of(path: Path) -> Any:
    """Returns the content of a file, with its tensors mapped into memory.

    Raises:
        RunError: the file can't be read, or contains anything but tensors.
    """
    require_plain(path)
    try:
        with torch.serialization.safe_globals(
            [(TensorReference, "torch_xla.utils.serialization.TensorReference")]
        ):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises many different errors for a damaged file
        raise unreadable(
            path, f"it is damaged or contains more than tensors ({type(error).__name__})"
        ) from error


@dataclass(frozen=True)
class StoredTensor:
    """Checkpoint tensor that is read on demand, with the interface of a safetensors slice."""

    path: Path
    name: str
    value: object

    def get_shape(self) -> tuple[int, ...]:
        return tuple(self.read().shape)

    def get_dtype(self) -> str:
        return NAMES[self.read().dtype]

    def read(self) -> Tensor:
        """Reads the tensor.

        Raises:
            RunError: it is not a weight tensor, or has more elements than the file stores.
        """
        path, value = self.path, self.value
        if isinstance(value, TensorReference) and type(value.tid) is int:
            path = path.with_name(f"{path.name}.tensors") / f"tensor_{value.tid}.pt"
            value = content_of(path)
        if (
            not isinstance(value, Tensor)
            or value.layout != torch.strided
            or value.dtype not in NAMES
        ):
            raise unreadable(path, f"{self.name} is not a weight tensor")
        if value.nbytes > value.untyped_storage().nbytes():
            raise unreadable(path, f"{self.name} has more numbers than the file stores")
        return value


def save(whole: dict[str, Tensor], shape: Model, degrees: Degrees, folder: Path) -> list[str]:
    """Writes weights with Hugging Face's names as a checkpoint in a new folder.

    Returns a list with the checkpoint's name. The same weights always produce the same bytes.
    """
    tag = folder / TAG
    (tag / MODEL).mkdir(parents=True)
    (tag / BEGUN).write_text("1")
    part = divide(whole, shape, degrees)
    cells = list(product(range(degrees.tensor), range(degrees.pipeline)))
    for rank, stage in cells:
        torch.save(part(rank, stage), tag / MODEL / name_of(rank, stage))
    (tag / DONE).write_text("1")
    return [f"{TAG} ({len(cells)} files)"]
