"""The house's measures, read off the syntax trees: sizes, circles, arrows, verbs, errors, and what is used of torch's private parts."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from test_walls import FILES, PACKAGE, room_of

from trainfleet.trust import errors

LONGEST_FILE = 450  # lines
MOST_ROOMS, MOST_ARROWS = 25, 148
ALL_TOKENS, ALL_MODULES = 427164, 306
MOST_TOKENS, MOST_DECISIONS = 250, 12  # of a function
# From the street down: a room imports only what is below it.
FLOORS = (
    ("__main__",), ("cli",), ("launch",), ("report",), ("watch",), ("backends",), ("images",), ("cloud",), ("hosts",), 
    ("plan", "recipes"),
    ("engine",), ("models", "devices"), ("data",),
    ("checkpoints",), ("config",), ("hardware",),
    ("node",), ("health", "storage",), ("run",), ("process",), ("trust",), ("__init__",),
)  # fmt: skip
VERBS = {
    path
    for path in FILES
    if path.parent.name == "cli" and path.stem not in ("__init__", "variables")
}
# torch's private names, all of them: what may go with the next version, and must be looked at for each.
PRIVATE_TORCH = {
    "engine/world.py": {"torch._C._distributed_c10d"},
    "engine/timing.py": {"torch._C._autograd"},
    "engine/optimizers.py": {"torch.distributed.tensor._utils"},
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


@cache
def trees() -> dict[Path, ast.Module]:
    """Each file of the program; the other workers, which also import this file, parse none."""
    return {path: ast.parse(path.read_text()) for path in FILES}


def imported(path: Path) -> set[str]:
    """The modules of ours that a file imports, anywhere in it, for its types too; `from . import x` is x where that is a module."""
    package, found = ["trainfleet", *path.relative_to(PACKAGE).parts[:-1]], set()
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else module for name in names}
    return found & set(MODULES) - {name_of(path)}


@cache
def graph() -> dict[str, set[str]]:
    return {name: imported(path) for name, path in MODULES.items()}


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


DECISIONS = (
    ast.If,
    ast.For,
    ast.While,
    ast.IfExp,
    ast.comprehension,
    ast.ExceptHandler,
    ast.Assert,
    ast.match_case,
)
WORDS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
TABLES = (ast.Dict, ast.List, ast.Set, ast.Tuple)


def functions(
    node: ast.AST, above: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions of a file, with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not isinstance(child, ast.ClassDef):
                yield above + child.name, child
            yield from functions(child, f"{above}{child.name}.")
        else:
            yield from functions(child, above)


def tokens_by_line(text: str) -> Counter[int]:
    """How many names, operators and literals each line has, however wide the lines are.

    An f-string is one, as it was before Python 3.12, and so are literals side by side. A comma
    before a closing bracket is none.
    """
    begins, ends = getattr(tokenize, "FSTRING_START", None), getattr(tokenize, "FSTRING_END", None)
    found: Counter[int] = Counter()
    depth, before = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if depth == 0 and token.type in (*WORDS, begins):
            literal = token.type in (tokenize.STRING, begins)
            found[token.start[0]] += not (literal and before == "literal")
            found[token.start[0]] -= before == "," and token.string in (")", "]", "}")
            before = "literal" if literal else token.string
        depth += (token.type == begins) - (token.type == ends)
    return found


def decisions(function: ast.AST) -> int:
    nodes = [*ast.walk(function)]
    return (
        1
        + sum(isinstance(node, DECISIONS) for node in nodes)
        + sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    )


def dense_and_branched(path: Path) -> tuple[set[str], set[str]]:
    """The functions of a file that have too many tokens, and those that have too many decisions."""
    lines, file = tokens_by_line(path.read_text()), path.relative_to(PACKAGE)
    here = [*functions(trees()[path])]
    return (
        {
            f"{file}:{name}"
            for name, node in here
            if sum(lines[n] for n in range(node.lineno, (node.end_lineno or 0) + 1)) > MOST_TOKENS
        },
        {f"{file}:{name}" for name, node in here if decisions(node) > MOST_DECISIONS},
    )


def skips(path: Path) -> int:
    """How many statements of a file ruff leaves as they are that are no tables."""
    lines = path.read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# fmt: skip")}
    tables = {
        node.end_lineno
        for node in ast.walk(trees()[path])
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return)
        and isinstance(node.value, TABLES)
    }
    return len(marked - tables)


def measured() -> tuple[set[str], set[str], dict[str, int]]:
    found = [dense_and_branched(path) for path in FILES]
    unformatted = {
        str(path.relative_to(PACKAGE)): count for path in FILES if (count := skips(path))
    }
    return (
        set().union(*(dense for dense, _ in found)),
        set().union(*(branched for _, branched in found)),
        unformatted,
    )


def rooms_and_arrows() -> tuple[int, int]:
    """How many rooms the program has, and how many pairs of them of which one imports the other."""
    arrows = {(room(here), room(there)) for here, others in graph().items() for there in others}
    return len({room(name) for name in graph()}), sum(here != there for here, there in arrows)


def test_no_file_is_too_long() -> None:
    assert not [path for path in FILES if path.read_text().count("\n") > LONGEST_FILE]


def test_no_function_is_too_dense() -> None:
    dense, branched, unformatted = measured()
    assert not dense
    assert not branched
    assert not unformatted, "ruff lays out all but tables"


def test_the_sum_of_tokens_and_modules_does_not_grow() -> None:
    files = [*(PACKAGE.parent).rglob("*.py")]
    tokens = sum(sum(tokens_by_line(path.read_text()).values()) for path in files)
    print(f"{tokens} tokens in {len(files)} files")
    assert tokens <= ALL_TOKENS and len(files) <= ALL_MODULES


def test_rooms_and_arrows_do_not_multiply() -> None:
    rooms, arrows = rooms_and_arrows()
    print(f"{rooms} rooms, {arrows} arrows between them, {len(graph())} files")
    assert rooms <= MOST_ROOMS and arrows <= MOST_ARROWS


def test_no_name_of_a_file_is_without_use() -> None:
    """Constants, functions and classes; four constants of a table once had no reader. A table may name a class, and a decorator uses its function."""
    texts = [path.read_text() for path in PACKAGE.parent.rglob("*.py")]
    every = [*texts, *(path.read_text() for path in PACKAGE.parent.rglob("*.yaml"))]
    used = Counter(word for text in every for word in re.findall(r"[A-Za-z_]\w*", text))
    made = re.compile(
        r"^(?:(?<!\)\n)def |class |)([A-Za-z_]\w*)(?: =|: .* =|\(|:$|\[)", re.MULTILINE
    )
    once = {name for text in texts for name in made.findall(text) if used[name] == 1}
    assert not once


def test_a_class_s_name_has_one_owner() -> None:
    names = Counter(
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, times in names.items() if times > 1] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(graph()) == []


def test_every_arrow_between_rooms_points_down() -> None:
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    up = {
        (here, there)
        for module, others in graph().items()
        for other in others
        if (here := room(module)) != (there := room(other)) and floor[there] < floor[here]
    }
    assert not up
    rooms: dict[str, set[str]] = {}
    for module, others in graph().items():
        rooms.setdefault(room(module), set()).update(map(room, others))
    assert circles({name: others - {name} for name, others in rooms.items()}) == []


@pytest.mark.parametrize("path", sorted(VERBS), ids=lambda path: path.stem)
def test_a_file_of_verbs_imports_no_other_file_of_verbs(path: Path) -> None:
    assert not {other for other in graph()[name_of(path)] if MODULES[other] in VERBS}


def test_the_tree_of_errors_is_the_whole_tree() -> None:
    bases: dict[str, str] = {}
    for tree in trees().values():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ClassDef)
                and node.bases
                and isinstance(node.bases[0], ast.Name)
            ):
                bases[node.name] = node.bases[0].id
    ours = {"TrainfleetError": ""}
    while more := {name: base for name, base in bases.items() if base in ours and name not in ours}:
        ours |= more
    drawn: dict[str, str] = {}
    above: list[str] = []
    for match in re.finditer(
        r"^    ((?:[│ ]   )*(?:[├└]── )?)(\w+) +\S", errors.__doc__ or "", flags=re.MULTILINE
    ):
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
            hidden = [
                place
                for place, part in enumerate(parts)
                if part.startswith("_") and not part.startswith("__")
            ]
            if parts[0] == "torch" and hidden:
                yield ".".join(parts[: hidden[-1] + 1])


def test_torch_s_private_names_are_those_of_the_list() -> None:
    used = {
        str(path.relative_to(PACKAGE)): names
        for path, tree in trees().items()
        if (names := set(private_names(tree)))
    }
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
    tree = ast.parse(
        "class A:\n    def f(self):\n        return 1 if a and b else [c for c in d]\n"
    )
    ((name, function),) = functions(tree)
    assert (name, decisions(function)) == ("A.f", 4)
    assert sum(tokens_by_line('x = f"{a + b} c"\n').values()) == 3, (
        "as many in every version of Python"
    )


# Files and labels with our name that are no modules.
OTHER = {"conf", "cfg", "lock", "layers", "platform", "sbom"}


def test_scripts_and_images_name_modules_that_exist() -> None:
    """A script that looks for a process by its module finds nothing once the module has moved."""
    root, unknown = PACKAGE.parents[1], set()
    files = [*root.glob("scripts/*.sh"), *root.glob("docker/Dockerfile*"), *PACKAGE.rglob("*.sh")]
    for path in files:
        for found in re.findall(r"trainfleet((?:\\?\.[a-z_]+)+)", path.read_text()):
            names = found.replace("\\", "").split(".")[1:]
            module = PACKAGE.joinpath(*names)
            if not (module.is_dir() or module.with_suffix(".py").exists() or names[0] in OTHER):
                unknown.add(f"{path.name}: {found}")
    assert not unknown
