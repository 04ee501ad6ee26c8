"""Only devices/ knows what kind of device there is; and every private name of torch stands in one table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "trainfleet"
NODE = ("engine", "models", "data")
FILES = sorted(path for room in NODE for path in (PACKAGE / room).rglob("*.py"))
NAMESPACES = {
    "cuda",
    "xpu",
    "mps",
    "npu",
    "hpu",
    "xla",
    "neuron",
    "accelerator",
}  # of torch, each for one kind of device
ASKING = {"is_cuda", "is_xpu", "is_mps", "is_cpu", "is_available", "is_meta"}
WORDS = {"cuda", "nccl", "xla", "neuron", "neuron_xla", "mps", "xpu"}
# Private names of torch that the engine takes, as torch has no public one, and what each is for. A new torch is looked at here.
PRIVATE = {
    "torch._C._autograd": "DeviceType, of a profiled event",
    "torch._C._distributed_c10d": "HashStore, PrefixStore, Store, TCPStore: a world of one, and of processes beside the ranks",
    "torch._functorch": "config.activation_memory_budget",
    "torch.distributed.tensor._utils": "compute_local_shape_and_global_offset: which part of a parameter is a rank's",
    "_call_impl": "nn.Module: what __call__ runs, to be compiled",
    "_compiled_call_impl": "nn.Module: what __call__ runs once it is compiled",
    "_foreach_mul_": "gradients of all parameters in one kernel",
    "_foreach_norm": "their norms in one kernel",
    "_get_init_p2p_neighbors_ops": "PipelineStage: what neighbours exchange first, of two types in 2.9",
    "_get_default_store": "the store in which the ranks met",
    "_modules": "nn.Module: a copy of a module that lacks some of its children",
    "_parameters": "nn.Module: which module owns a parameter",
    "_prepare_forward_infra": "PipelineStage: learns shapes by running the stage once, with its dropout",
}
# Names that begin alike and are ours, or the standard library's.
OURS = {"_exit", "_replace", "_asdict", "_fields"}


def asks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each place that asks for the kind of device, with its line."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
            and node.attr in NAMESPACES
        ):
            yield node.lineno, f"torch.{node.attr}"
        elif isinstance(node, ast.Attribute) and node.attr in ASKING:
            yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(_is_kind(side) for side in sides) and any(_is_text(side) for side in sides):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Match) and _is_kind(node.subject):
            yield node.lineno, f"match {ast.unparse(node.subject)}"
        elif isinstance(node, ast.Constant) and node.value in WORDS and id(node) not in docstrings:
            yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            for name in names:
                if name.split(".")[0] in ("torch_xla", "torch_neuronx") or name.startswith(
                    tuple(f"torch.{each}" for each in NAMESPACES)
                ):
                    yield node.lineno, f"import of {name}"


def _is_kind(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr in ("kind", "device_type")) or (
        isinstance(node, ast.Attribute)
        and node.attr == "type"
        and "device" in ast.unparse(node.value)
    )


def _is_text(node: ast.expr) -> bool:
    elements = node.elts if isinstance(node, ast.Tuple | ast.Set | ast.List) else [node]
    return all(
        isinstance(element, ast.Constant) and isinstance(element.value, str) for element in elements
    )


def private(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each private name of torch that a file takes: a module with an underscore, or an attribute with one of another's object."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("torch")
            and "._" in (node.module or "")
        ):
            yield node.lineno, str(node.module)
        elif (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and node.attr not in OURS:
                yield node.lineno, node.attr


@pytest.mark.parametrize(
    "text",
    ['device.kind == "cpu"', 'if "cuda" == x.device.type: pass', 'device.kind in ("cuda", "neuron")', "torch.cuda.synchronize()",
     "tensor.is_cuda", "match device.kind:\n    case 1: pass", "import torch_xla.core", "from torch.cuda import nvtx", 'torch.device("cuda")',
     "torch.accelerator.current_device()", "torch.backends.mps.is_available()"],
)  # fmt: skip
def test_a_question_is_found(text: str) -> None:
    assert list(asks(ast.parse(text)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_outside_devices_asks_for_the_kind(path: Path) -> None:
    assert [f"{path}:{line} {what}" for line, what in asks(ast.parse(path.read_text()))] == []


def test_every_private_name_of_torch_is_in_the_table_and_nothing_else() -> None:
    taken = {}
    for path in FILES:
        tree = ast.parse(path.read_text())
        if "torch" in {
            name.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for name in node.names
        } | {
            (node.module or "").split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }:
            taken |= {name: f"{path}:{line}" for line, name in private(tree)}
    assert {name: where for name, where in taken.items() if name not in PRIVATE} == {}
    assert PRIVATE.keys() - taken.keys() == set()
