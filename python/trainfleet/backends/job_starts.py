"""Reads the files that each start of a Slurm job leaves in the job's folder.

Each requeue counts as a new start. nodes/<token> contains the job ID, and nodes/slurm-<id>-<start>/
contains the nodes' exit codes.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..run import contents, run_folder
from ..trust import untrusted_input
from ..trust.errors import InputError

# default exit codes for nodes that wrote none: killed, or terminated along with another node
KILLED = 137
ENDED = 143
LARGEST = 1 << 20  # maximum number of bytes to read per file


def claim(folder: Path, token: str) -> Path:
    """Returns the file that maps a token to its job ID.

    Written by the submitter or by the token's first job (sbatch.py).
    """
    return contents.CLAIM.at(folder, token=token or "-")


def number(folder: Path, token: str) -> str:
    """Returns the job ID in a token's claim file, or "" if the claim is missing or invalid."""
    text = _text(claim(folder, token)).strip()
    return text if untrusted_input.whole(text) else ""


def exits(folder: Path, job: str) -> tuple[int, dict[int, int]]:
    """Returns the number of the job's newest start, and its nodes' exit codes.

    The number is -1 before the first start.
    """
    started = contents.START.at(folder, job=job, start="*")
    names = [path.name.rpartition("-")[2] for path in started.parent.glob(started.name)]
    newest = max(
        (start for name in names if (start := untrusted_input.whole(name)) is not None), default=-1
    )
    return newest, exits_of(contents.START.at(folder, job=job, start=newest)) if newest >= 0 else {}


def exits_of(start: Path) -> dict[int, int]:
    """Returns node → exit code for those of the start's nodes that have ended."""
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
    """Returns log → size in bytes when the start began, as recorded by the batch script (wc -c)."""
    found = {}
    for line in _text(start / "logs").splitlines():
        size, _, name = line.strip().partition(" ")
        if (bytes_ := untrusted_input.whole(size)) is not None:
            found[Path(name)] = bytes_
    return found


def facts_of(start: Path, node: int) -> Path:
    """Returns the file that contains the node's facts, in the start's folder."""
    return start / f"facts-{node}"


def preflight_folder(start: Path) -> Path:
    """Returns the folder of the preflight's bandwidth test, in the start's folder."""
    return start / "gate"


def why_cancelled(folder: Path, job: str, start: int) -> str:
    """Returns why Slurm cancelled a start, from slurmstepd's message on the first node.

    Returns "" if Slurm did not cancel it.
    """
    words = rf"\*\*\* JOB {job} ON \S+ CANCELLED AT \S+(?: DUE TO [A-Z, ]+)? \*\*\*"
    said = re.findall(rf"(?m)^slurmstepd\S*: error: ({words})$", _said(folder, job, start))
    return "" if not said else said[-1] if "DUE TO" in said[-1] else f"slurm: job {job} CANCELLED"


def ends(folder: Path, job: str, start: int, nodes: int) -> dict[int, int]:
    """Derives an exit code from srun's messages for each node that wrote none.

    Nodes without a message get KILLED, or ENDED if srun terminated all nodes because one failed
    (--kill-on-bad-exit).
    """
    text, ending, _ = _said(folder, job, start).partition(f"Terminating StepId={job}.")
    codes: dict[int, int] = {}
    for tasks, words in re.findall(
        r"(?m)^srun: error: \S{1,200}: tasks? ([0-9,-]{1,200}): (.*)", text
    ):
        code = re.match("Exited with exit code ([0-9]{1,3})$", words)
        for first, last in re.findall(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", tasks):
            for node in range(int(first), min(int(last or first) + 1, nodes)):
                # the first code counts, because later steps only check whether to continue
                codes.setdefault(node, int(code[1]) if code else KILLED)
    return {node: codes.get(node, ENDED if ending else KILLED) for node in range(nodes)}


def _said(folder: Path, job: str, start: int) -> str:
    """Returns Slurm's messages since a start began, or "" before the first start.

    The log also contains the messages of other jobs.
    """
    if start < 0:
        return ""
    log = run_folder.job_log(folder)
    return _text(log, lengths(contents.START.at(folder, job=job, start=start)).get(log, 0))


def _text(path: Path, offset: int = 0) -> str:
    """Returns a file's text starting at `offset`, or "" if it can't be read."""
    try:
        with untrusted_input.open_regular(path) as file:
            file.seek(offset)
            return file.read(LARGEST).decode(errors="replace")
    except (OSError, InputError):
        return ""
