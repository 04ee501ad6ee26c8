"""The house's measures, read off the syntax trees: sizes, circles, arrows, verbs, errors, and what is used of torch's private parts."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from test_walls import FILES, GROUND, PACKAGE, room_of

from trainfleet import errors

LONGEST_FUNCTION, LONGEST_FILE, LONGEST_VERB = 40, 400, 60  # lines
TREES = {path: ast.parse(path.read_text()) for path in FILES}
# From the street down: a room imports only what stands below it, and the ground floor what it likes of the ground.
FLOORS = (
    ("__main__",), ("cli",), ("launch",), ("report",), ("watch",), ("backends",), ("images",), ("cloud",), ("nodes",), 
    ("plan", "recipes"),
    ("engine",), ("models", "devices"), ("data",), tuple(GROUND),
)  # fmt: skip
VERBS = {path for path in FILES if path.parent.name == "cli" and path.stem not in ("__init__", "variables")}
# torch's private names, all of them: what may go with the next version, and must be looked at for each.
PRIVATE_TORCH = {
    "engine/world.py": {"torch._C._distributed_c10d"},
    "engine/tree.py": {"torch._C._distributed_c10d"},
    "engine/profile.py": {"torch._C._autograd"},
    "engine/updates.py": {"torch.distributed.tensor._utils"},
    "engine/parallel/blocks.py": {"torch._functorch"},
    "devices/cpu.py": {"torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"},
    "devices/cuda.py": {
        "torch.ops.aten._scaled_dot_product_flash_attention", "torch.ops.aten._scaled_dot_product_efficient_attention",
        "torch.ops.aten._scaled_dot_product_cudnn_attention",
    },
    "engine/parallel/gradients.py": {"torch._foreach_mul_", "torch._foreach_norm"},
}  # fmt: skip


def name_of(path: Path) -> str:
    parts = ("trainfleet", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, without what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield child
            yield from statements(child)


def imported(path: Path) -> set[str]:
    """The modules of ours that a file imports, anywhere in it; `from . import x` is x where that is a module."""
    package, found = ["trainfleet", *path.relative_to(PACKAGE).parts[:-1]], set()
    for node in statements(TREES[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else module for name in names}
    return found & set(MODULES) - {name_of(path)}


GRAPH = {name: imported(path) for name, path in MODULES.items()}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        path.append(node)
        for other in graph.get(node, ()):
            if other not in order:
                visit(other)
            if other in path:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            group = path[path.index(node) :]
            del path[path.index(node) :]
            found.extend([sorted(group)] if len(group) > 1 else [])

    for node in graph:
        if node not in order:
            visit(node)
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_no_function_and_no_file_is_too_long() -> None:
    functions = [
        f"{path.relative_to(PACKAGE)}: {node.name} has {lines} lines"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (lines := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    files = [f"{path.relative_to(PACKAGE)}: {lines}" for path in FILES if (lines := path.read_text().count("\n")) > LONGEST_FILE]
    assert not functions + files


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(GRAPH) == []


def test_every_arrow_between_rooms_points_down() -> None:
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    up = {
        (here, there)
        for module, others in GRAPH.items()
        for other in others
        if (here := room(module)) != (there := room(other)) and floor[there] < floor[here]
    }
    assert not up
    rooms: dict[str, set[str]] = {}
    for module, others in GRAPH.items():
        rooms.setdefault(room(module), set()).update(map(room, others))
    assert circles({name: others - {name} for name, others in rooms.items()}) == []


@pytest.mark.parametrize("path", sorted(VERBS), ids=lambda path: path.stem)
def test_a_verb_s_file_is_short_and_imports_no_other_verb(path: Path) -> None:
    assert path.read_text().count("\n") <= LONGEST_VERB
    assert not {other for other in GRAPH[name_of(path)] if MODULES[other] in VERBS}


def test_the_tree_of_errors_is_the_whole_tree() -> None:
    bases: dict[str, str] = {}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.bases and isinstance(node.bases[0], ast.Name):
                bases[node.name] = node.bases[0].id
    ours = {"TrainfleetError": ""}
    while more := {name: base for name, base in bases.items() if base in ours and name not in ours}:
        ours |= more
    drawn: dict[str, str] = {}
    above: list[str] = []
    for match in re.finditer(r"^    ((?:[│ ]   )*(?:[├└]── )?)(\w+) +\S", errors.__doc__ or "", flags=re.MULTILINE):
        depth = len(match[1]) // 4
        above = [*above[:depth], match[2]]
        drawn[match[2]] = above[-2] if len(above) > 1 else ""
    assert drawn == ours


def private_names(tree: ast.AST) -> Iterator[str]:
    """What a file uses of torch whose name begins with an underscore: the dotted name up to its last private part."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                parts, value = [value.attr, *parts], value.value
            names = [".".join([value.id, *parts])] if isinstance(value, ast.Name) else []
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            hidden = [place for place, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
            if parts[0] == "torch" and hidden:
                yield ".".join(parts[: hidden[-1] + 1])


def test_torch_s_private_names_are_those_of_the_list() -> None:
    used = {str(path.relative_to(PACKAGE)): names for path, tree in TREES.items() if (names := set(private_names(tree)))}
    assert used == PRIVATE_TORCH


def test_no_two_files_of_tests_bear_one_name() -> None:
    """pytest can't collect both in one process: `make drills` would end before its first test."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_the_measures_would_see_what_is_wrong() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []
    assert set(private_names(ast.parse("import torch\ntorch._dynamo.reset()\nfrom torch._inductor import config"))) == {
        "torch._dynamo", "torch._inductor",
    }  # fmt: skip
    assert room_of(PACKAGE / "cli" / "plan.py") == "cli"
