"""What a job leaves in its folder: nodes/<token>, which job carries it out; nodes/slurm-<id>-<start>/, how its nodes ended."""

from __future__ import annotations

from pathlib import Path

from ... import door
from ...errors import InputError

NODES = "nodes"


def mark(folder: Path, token: str) -> Path:
    """The file that says which job carries a token out: whoever writes it first (batch.py writes it too)."""
    return folder / NODES / (token or "-")


def number(folder: Path, token: str) -> str:
    """The job that carries a token out, as its mark says; "" while there is none."""
    return _digits(mark(folder, token))


def exits(folder: Path, job: str) -> tuple[int, dict[int, int]]:
    """The newest start of a job, from 0, and how its nodes ended in it; -1 before the first."""
    starts = [int(last) for path in (folder / NODES).glob(f"slurm-{job}-*") if (last := path.name.rpartition("-")[2]).isdecimal()]
    if not starts:
        return -1, {}
    return max(starts), exits_of(folder / NODES / f"slurm-{job}-{max(starts)}")


def exits_of(start: Path) -> dict[int, int]:
    """Node → exit code of those that have ended in a start."""
    files = {path.stem.removeprefix("node-"): path for path in start.glob("node-*.exit")}
    return {int(node): int(code) for node, path in files.items() if node.isdecimal() and (code := _digits(path))}


def _digits(path: Path) -> str:
    try:
        with door.open_regular(path) as file:
            text = file.read(20).decode(errors="replace").strip()
    except (OSError, InputError):
        return ""
    return text if text.isdecimal() else ""
