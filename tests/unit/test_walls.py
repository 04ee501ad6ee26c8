"""The walls between the rooms (README, Architecture): who may import whom, by reading every import statement."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "trainfleet"
GROUND = {
    "errors",
    "beats",
    "checkpoints",
    "config",
    "events",
    "fence",
    "heartbeat",
    "kernel",
    "lease",
    "output",
    "runs",
    "hardware",
    "processes",
    "s3",
    "seat",
    "stacks",
    "supervisor",
    "streams",
    "travel",
    "link",
    "uplink",
    "watchdog",
    "door",
    "records",
    "shapes",
    "spelling",
    "__init__",
}
CONTROL = {"cli", "plan", "backends", "nodes", "recipes", "cloud", "watch", "report", "__main__"}
NODE = {"data", "models", "engine", "devices"}
# What of data/ the control plane may use: listing sources, reading manifests and progress. None of it imports torch.
LISTING = {"trainfleet.data", "trainfleet.data.dataset", "trainfleet.data.manifest", "trainfleet.data.progress",
           "trainfleet.data.sources", "trainfleet.data.summary", "trainfleet.data.tokenizer"}  # fmt: skip
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
            found += [(node.lineno, module), *((node.lineno, f"{module}.{alias.name}") for alias in node.names)]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_is_in_a_known_room() -> None:
    assert {room_of(path) for path in FILES} <= GROUND | CONTROL | NODE


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_goes_through_a_wall(path: Path) -> None:
    room = room_of(path)
    for line, module in imports_of(path):
        where = f"{path}:{line} imports {module}"
        assert not any(module == name or module.startswith(f"{name}.") for name in FORBIDDEN.get(room, ())), where
        parts = module.split(".")
        if parts[0] != "trainfleet" or len(parts) < 2:
            continue
        other = parts[1]
        if room in CONTROL and other in NODE:
            assert ".".join(parts[:3]) in LISTING, where
        if room in NODE:
            assert other not in CONTROL, where
        if room in GROUND and other not in GROUND:
            assert (room, ".".join(parts[:3])) == ("config", "trainfleet.data.tokenizer") or other not in CONTROL | NODE, where


def test_only_devices_asks_for_the_kind_of_device_and_only_backends_for_the_backend() -> None:
    for path in FILES:
        room, text = room_of(path), path.read_text()
        if room in NODE - {"devices"}:
            assert not any(
                word in text for word in (".is_cuda", "torch.cuda", "is_available()", 'type == "cuda"', "torch_neuronx")
            ), path
        if room in CONTROL - {"backends"}:
            assert 'backend == "' not in text and "isinstance(backend" not in text, path
