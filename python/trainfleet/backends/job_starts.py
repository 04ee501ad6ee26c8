"""The starts of a job, from its folder: nodes/<token> names the job; nodes/slurm-<id>-<start>/ has
the nodes' exit codes.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..run import contents, run_folder
from ..trust import untrusted_input
from ..trust.errors import InputError

# the exit code of a node that left none: by itself, or as the engine ended it with others
KILLED, ENDED = (137, 143)
LARGEST = 1 << 20  # bytes that are read of a file


def claim(folder: Path, token: str) -> Path:
    """The file that says which job carries a token out: whoever writes it first (sbatch.py writes
    it too).
    """
    return contents.CLAIM.at(folder, token=token or "-")


def number(folder: Path, token: str) -> str:
    """The job that carries a token out, as its claim says; "" while there is none."""
    text = _text(claim(folder, token)).strip()
    return text if untrusted_input.whole(text) else ""


def exits(folder: Path, job: str) -> tuple[int, dict[int, int]]:
    """The newest start of a job, from 0, and how its nodes ended in it; -1 before the first."""
    started = contents.START.at(folder, job=job, start="*")
    names = [path.name.rpartition("-")[2] for path in started.parent.glob(started.name)]
    newest = max(
        (start for name in names if (start := untrusted_input.whole(name)) is not None), default=-1
    )
    return newest, exits_of(contents.START.at(folder, job=job, start=newest)) if newest >= 0 else {}


def exits_of(start: Path) -> dict[int, int]:
    """Node → exit code of those that have ended in a start."""
    codes = {
        path.stem.removeprefix("node-"): untrusted_input.whole(_text(path).strip(), 255)
        for path in start.glob("node-*.exit")
    }
    return {
        node: code
        for name, code in codes.items()
        if (node := untrusted_input.whole(name)) is not None and code is not None
    }


def lengths(start: Path) -> dict[Path, int]:
    """How long the logs were when a start began, as the batch script left it (wc -c)."""
    found = {}
    for line in _text(start / "logs").splitlines():
        size, _, name = line.strip().partition(" ")
        if (bytes_ := untrusted_input.whole(size)) is not None:
            found[Path(name)] = bytes_
    return found


def facts_of(start: Path, node: int) -> Path:
    """Where a node has said what it is, in a start's folder."""
    return start / f"facts-{node}"


def gate_folder(start: Path) -> Path:
    """The folder of the gate's bandwidth test, in a start's."""
    return start / "gate"


def why_cancelled(folder: Path, job: str, start: int) -> str:
    """Why Slurm ended a start of a job, as its daemon on the first node wrote; "" where it did
    not.
    """
    words = rf"\*\*\* JOB {job} ON \S+ CANCELLED AT \S+(?: DUE TO [A-Z, ]+)? \*\*\*"
    said = re.findall(rf"(?m)^slurmstepd\S*: error: ({words})$", _said(folder, job, start))
    return "" if not said else said[-1] if "DUE TO" in said[-1] else f"slurm: job {job} CANCELLED"


def ends(folder: Path, job: str, start: int, nodes: int) -> list[int]:
    """How each node ended that left no exit code itself, as srun wrote: with its code, or KILLED
    where srun tells none.

    Where srun ended the others for one that failed (--kill-on-bad-exit), ENDED for all without a
    code until then.
    """
    text, ending, _ = _said(folder, job, start).partition(f"Terminating StepId={job}.")
    codes: dict[int, int] = {}
    for tasks, words in re.findall(
        r"(?m)^srun: error: \S{1,200}: tasks? ([0-9,-]{1,200}): (.*)", text
    ):
        code = re.match("Exited with exit code ([0-9]{1,3})$", words)
        for first, last in re.findall(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", tasks):
            for node in range(int(first), min(int(last or first) + 1, nodes)):
                # a later step is that which asks whether to go on
                codes.setdefault(node, int(code[1]) if code else KILLED)
    return [codes.get(node, ENDED if ending else KILLED) for node in range(nodes)]


def _said(folder: Path, job: str, start: int) -> str:
    """What Slurm has written in a start of a job; "" before its first: the log has other jobs'
    words too.
    """
    if start < 0:
        return ""
    log = run_folder.job_log(folder)
    return _text(log, lengths(contents.START.at(folder, job=job, start=start)).get(log, 0))


def _text(path: Path, offset: int = 0) -> str:
    """What stands in a file from `offset` on; "" where it can't be read."""
    try:
        with untrusted_input.open_regular(path) as file:
            file.seek(offset)
            return file.read(LARGEST).decode(errors="replace")
    except (OSError, InputError):
        return ""
