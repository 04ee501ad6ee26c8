"""What saves time or memory changes no loss: recomputation, compiled blocks, and, nearly, bf16 and fp8."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import torch
from ranks import Bench
from torch import Tensor

from requirement import need
from trainfleet import models
from trainfleet.config.types import Model
from trainfleet.devices.cpu import Cpu
from trainfleet.engine.parallel import blocks

pytestmark = pytest.mark.timeout(
    900
)  # of the first, which waits for all runs of the file, half of them compiled

SHARDED = {"train.parallelism.fsdp": 2}
TENSOR = {"train.parallelism.tensor": 2}
# what differs, ranks, and how far losses and norms may be from one process without it
KINDS = {
    "recompute-full": ({"train.activation_checkpointing": "full"}, 1, 1e-5, 1e-5),
    "recompute-selective-sharded": (
        {"train.activation_checkpointing": "selective", **SHARDED},
        2,
        1e-5,
        1e-5,
    ),
    "recompute-full-tensor": ({"train.activation_checkpointing": "full", **TENSOR}, 2, 1e-5, 1e-5),
    "compiled": ({"train.compile": "true"}, 1, 1e-5, 1e-5),
    "compiled-replicas": ({"train.compile": "true"}, 2, 1e-5, 1e-5),
    "compiled-sharded-recomputed": (
        {"train.compile": "true", "train.activation_checkpointing": "selective", **SHARDED},
        2,
        1e-5,
        1e-5,
    ),
    "budget": ({"train.compile": "true", "train.activation_memory_budget": 0.4}, 1, 1e-5, 1e-5),
    "budget-sharded": (
        {"train.compile": "true", "train.activation_memory_budget": 0.4, **SHARDED},
        2,
        1e-5,
        1e-5,
    ),
    "bf16": ({"train.precision": "bf16"}, 1, 1e-3, 2e-2),
    "bf16-sharded": ({"train.precision": "bf16", **SHARDED}, 2, 1e-3, 2e-2),
}
EIGHTHS = {
    "fp8": ({"train.compile": "true"}, 1),
    "fp8-sharded-recomputed": ({"train.activation_checkpointing": "selective", **SHARDED}, 2),
    "fp8-pipelined-half-weights": (
        {"train.param_dtype": "bf16", "train.parallelism.pipeline": 2},
        2,
    ),
}
COMMON = {"train.steps": 8, "train.validate_every": 4, "train.epsilon": 1e-3}


@pytest.fixture(scope="module")
def runs(bench: Bench, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Those that are to be judged, one without anything, and one in bf16, which others are judged by."""
    chosen = {
        item.callspec.params.get("name")
        for item in request.session.items
        if hasattr(item, "callspec")
    } | {"bf16"}
    kinds = {name: kind for name, kind in KINDS.items() if name in chosen}
    made = {
        name: bench.prepare(name, size, **COMMON | values)
        for name, (values, size, *_) in kinds.items()
    }
    plain = bench.prepare(
        "plain", 1, **COMMON | {"train.activation_checkpointing": "none", "train.compile": "false"}
    )
    bench.train_all([(plain, 1), *((run, KINDS[name][1]) for name, run in made.items())])
    return {"plain": plain, **made}


@pytest.fixture(scope="module")
def eighths(bench: Bench) -> dict[str, Path]:
    """Runs with products in fp8, which a config asks of no CPU: it is put into the resolved one."""
    need("torchao", "pip install torchao==0.18.0")
    made = {
        name: bench.prepare(name, size, **COMMON | {"train.precision": "bf16"} | values)
        for name, (values, size) in EIGHTHS.items()
    }
    for run in made.values():
        resolved = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(resolved.replace("precision: bf16", "precision: fp8"))
    bench.train_all(
        [(run, EIGHTHS[name][1]) for name, run in made.items()],
        str(Path(__file__).with_name("eighths.py")),
    )
    return made


@pytest.mark.parametrize("name", EIGHTHS)
def test_fp8_trains_nearly_as_bf16_does(
    runs: dict[str, Path], eighths: dict[str, Path], name: str
) -> None:
    ours, theirs = ranks.metrics(eighths[name]), ranks.metrics(runs["bf16"])
    assert ranks.results(eighths[name])["precision"] == "float8_e4m3fn" and ours != theirs
    for line, other in zip(ours, theirs, strict=True):
        assert line.pop("grad_norm") == pytest.approx(other.pop("grad_norm"), rel=0.1)
        assert line == pytest.approx(other, rel=5e-3)


@pytest.mark.parametrize("name", KINDS)
def test_it_trains_as_without(runs: dict[str, Path], name: str) -> None:
    *_, near, norm_near = KINDS[name]
    for ours, theirs in zip(ranks.metrics(runs[name]), ranks.metrics(runs["plain"]), strict=True):
        assert ours.pop("grad_norm") == pytest.approx(theirs.pop("grad_norm"), rel=norm_near)
        assert ours == pytest.approx(theirs, rel=near)


def kept(how: str | float) -> int:
    """Bytes that two compiled blocks keep for their backward pass, beside their weights."""
    torch._dynamo.reset()
    model = models.build(Model("test", "llama", 2, 128, 4, 4, 344, 256, 256, 10_000.0, 1e-5, False))
    model.initialize(0)
    blocks.compile_blocks(
        model, model.get_submodule(model.plan.blocks).children(), how, Cpu(), loss=False
    )
    found = {parameter.untyped_storage().data_ptr(): 0 for parameter in model.parameters()}

    def seen(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    tokens = torch.randint(0, 256, (4, 128), generator=torch.Generator().manual_seed(1))
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        x = model.features(tokens)
    x.sum().backward()
    return sum(found.values())


def test_a_budget_is_kept_to() -> None:
    """Of what compiled blocks keep otherwise, they keep no more than the part that is allowed, and what lies about them."""
    whole, half, least = kept("none"), kept(0.5), kept(0.0)
    assert least < 0.2 * whole and least < half < least + 0.5 * whole
