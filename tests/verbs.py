"""The verbs as a user types them in a folder, and the text that small runs are made of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainfleet.run.run_folder import read_lines

ROOT = Path(__file__).parents[1]
PACKAGES = f"{ROOT / 'python'}{os.pathsep}{ROOT / 'tests/strict'}"  # the program, and what checks its requests to AWS


def begin(
    folder: Path,
    verb: str,
    *words: str,
    python: str = sys.executable,
    variables: dict[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[str]:
    """The process of a verb typed in a folder, with these variables in its environment; all that it says is its stdout."""
    environment = os.environ | {"PYTHONPATH": PACKAGES, "NO_COLOR": "1"} | (variables or {})
    return subprocess.Popen([python, "-m", "trainfleet", verb, *words], cwd=folder, env=environment, text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)  # fmt: skip


def finish(process: subprocess.Popen[str], code: int = 0, timeout: float = 500) -> str:
    """What a verb has said, once it has ended with `code`."""
    try:
        said = process.communicate(timeout=timeout)[0]
    finally:
        process.kill()  # which does nothing to one that has ended
    assert process.returncode == code, said
    return said


def enter(
    folder: Path, verb: str, *words: str, code: int = 0, timeout: float = 500, **options: Any
) -> str:
    """What a verb typed in a folder says, once it has ended with `code`."""
    return finish(begin(folder, verb, *words, **options), code, timeout)


def write_text(folder: Path) -> Path:
    """The new folder, with forty small documents."""
    folder.mkdir()
    for number in range(40):
        words = " ".join(f"word{(number * step) % 97} is {step}." for step in range(60))
        (folder / f"{number}.txt").write_text(f"Document {number}. {words}\n")
    return folder


def losses(run: Path) -> dict[int, float]:
    """The loss of each logged step of a run's folder."""
    return {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl")}
