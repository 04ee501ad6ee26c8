"""The walls between the rooms (README, Architecture): who may import whom, by reading every import statement."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "trainfleet"
GROUND = {
    "__init__",
    "checkpoints",
    "config",
    "hardware",
    "health",
    "node",
    "process",
    "run",
    "storage",
    "trust",
}
CONTROL = {
    "cli",
    "images",
    "launch",
    "plan",
    "backends",
    "hosts",
    "recipes",
    "cloud",
    "watch",
    "report",
    "__main__",
}
NODE = {"data", "models", "engine", "devices"}
# What of data/ the control plane may use: listing sources, reading manifests and progress. None of it imports torch.
LISTING = {"trainfleet.data", "trainfleet.data.dataset", "trainfleet.data.dataset_store", "trainfleet.data.manifest", "trainfleet.data.progress",
           "trainfleet.data.sources", "trainfleet.data.description", "trainfleet.data.tokenizer", "trainfleet.data.source_survey"}  # fmt: skip
FORBIDDEN = {  # room → packages that it must not import
    **{key: {"torch", "torch_xla", "torch_neuronx", "transformers"} for key in CONTROL | GROUND},
    **{key: {"fabric", "paramiko"} for key in NODE},
    "plan": {"torch", "fabric", "paramiko", "boto3", "botocore", "subprocess", "socket"},
    "models": {"fabric", "paramiko", "boto3", "botocore", "torch.distributed"},
    "data": {"fabric", "paramiko", "torch"},
}


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Every module that a file imports, anywhere in it, with the line; `from . import x` counts as both `.` and `.x`."""
    package = ["trainfleet", *path.relative_to(PACKAGE).parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [
                (node.lineno, module),
                *((node.lineno, f"{module}.{alias.name}") for alias in node.names),
            ]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_is_in_a_known_room() -> None:
    assert {room_of(path) for path in FILES} <= GROUND | CONTROL | NODE


def test_the_page_of_the_architecture_has_every_room() -> None:
    picture = (PACKAGE.parents[1] / "docs/explanation/architecture.md").read_text().split("```")[1]
    rooms = GROUND | CONTROL | NODE
    assert not {
        room
        for room in rooms
        if not room.startswith("_") and not re.search(rf"\b{room}\b", picture)
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_goes_through_a_wall(path: Path) -> None:
    room = room_of(path)
    for line, module in imports_of(path):
        where = f"{path}:{line} imports {module}"
        assert not any(
            module == name or module.startswith(f"{name}.") for name in FORBIDDEN.get(room, ())
        ), where
        parts = module.split(".")
        if parts[0] != "trainfleet" or len(parts) < 2:
            continue
        other = parts[1]
        if room in CONTROL and other in NODE:
            assert ".".join(parts[:3]) in LISTING, where
        if room in NODE:
            assert other not in CONTROL, where
        if room in GROUND and other not in GROUND:
            assert other not in CONTROL | NODE, where


def test_only_devices_asks_for_the_kind_of_device() -> None:
    for path in FILES:
        if room_of(path) in NODE - {"devices"}:
            text = path.read_text()
            words = (".is_cuda", "torch.cuda", "is_available()", 'type == "cuda"', "torch_neuronx")
            assert not any(word in text for word in words), path


# Who may ask which backend it is, or what it can: nobody but backends/ and launch/.
KNOWN_TO_ASK: set[str] = set()
KINDS = {"local", "ssh", "ec2", "slurm", "batch", "sagemaker"}
CAPABILITIES = {"Can", "can", "is_here", "hands_over", "reached_by_ssh", "shares_disk", "BACKENDS"}


def names_a_backend(node: ast.AST) -> bool:
    """Whether an expression is `fleet.backend`, `record["backend"]` or `record.get("backend")`, or the name of one."""
    match node:
        case ast.Constant(value=str(word)):
            return word in KINDS
        case ast.Attribute(
            attr="backend", value=ast.Attribute(attr="fleet") | ast.Name(id="fleet")
        ):
            return True
        case ast.Subscript(slice=ast.Constant(value="backend")):
            return True
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value="backend"), *_]):
            return True
    return False


def asks_for_the_backend(tree: ast.AST) -> list[int]:
    """The lines on which code compares a backend's name, chooses by it, or looks at what a backend can."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                parts = [
                    part
                    for side in (left, *others)
                    for part in (
                        side.elts if isinstance(side, ast.Tuple | ast.Set | ast.List) else [side]
                    )
                ]
                asks = any(map(names_a_backend, parts))
            case ast.Match(subject=subject):
                asks = names_a_backend(subject)
            case ast.MatchValue(value=value):
                asks = names_a_backend(value)
            case ast.Subscript(slice=key):
                asks = names_a_backend(key) and not isinstance(key, ast.Constant)
            case ast.ImportFrom(module=str(module)):
                asks = module.split(".")[-2:-1] == ["backends"] and module.split(".")[-1] in KINDS
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
                asks = name in CAPABILITIES
            case _:
                asks = False
        if asks:
            found.append(getattr(node, "lineno", 0))
    return found


# What others may import of backends/, beside the package itself: nothing that only one backend has.
OF_ALL_BACKENDS = {
    "skeleton",
    "base",
    "head",
    "node_script",
    "run_storage",
    "job_starts",
}


def asks_what_kind_it_is(tree: ast.AST) -> list[int]:
    """The lines on which code asks by isinstance what a backend, its machines or its place are."""
    asked = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
    ]
    words = re.compile(r"\b(backend\w*|machines|place|head|harm)\b")
    return [node.lineno for node in asked if words.search(ast.unparse(node.args[0]))]


def test_all_take_what_a_backend_hands_out_and_ask_no_further() -> None:
    package = "trainfleet.backends"
    for path in FILES:
        if room_of(path) == "backends":
            continue
        for line, module in imports_of(path):
            part = (
                module.removeprefix(package).split(".")[1:2]
                if module.startswith(f"{package}.")
                else []
            )
            names_module = (part and (PACKAGE / "backends" / f"{part[0]}.py").exists()) or (
                part and (PACKAGE / "backends" / part[0]).is_dir()
            )
            assert not names_module or part[0] in OF_ALL_BACKENDS, f"{path}:{line} imports {module}"
        tree = ast.parse(path.read_text())
        assert not asks_what_kind_it_is(tree), (
            f"{path}: isinstance of a backend or what it hands out"
        )
        compared = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Compare)
            and any(map(names_a_backend, (node.left, *node.comparators)))
        ]
        assert not compared, f"{path}:{compared} compares a backend's name"


def test_nobody_asks_which_backend_it_is_or_what_it_can() -> None:
    asking = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in FILES
        if room_of(path) not in ("backends", "launch")
        for line in asks_for_the_backend(ast.parse(path.read_text()))
    }
    assert not asking - KNOWN_TO_ASK, asking
