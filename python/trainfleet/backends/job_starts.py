"""Reads the starts of a Slurm job from the job's folder. nodes/<token> identifies the job, and
nodes/slurm-<id>-<start>/ contains the nodes' exit codes.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..run import contents, run_folder
from ..trust import untrusted_input
from ..trust.errors import InputError

# Exit codes for nodes that wrote none: killed, or ended by the scheduler together with others.
KILLED, ENDED = (137, 143)
LARGEST = 1 << 20  # most bytes to read from a file


def claim(folder: Path, token: str) -> Path:
    """Returns the file that identifies a token's job. The submitter or the token's first job writes
    it (sbatch.py).
    """
    return contents.CLAIM.at(folder, token=token or "-")


def number(folder: Path, token: str) -> str:
    """Returns the job id in a token's claim file; "" without a claim."""
    text = _text(claim(folder, token)).strip()
    return text if untrusted_input.whole(text) else ""


def exits(folder: Path, job: str) -> tuple[int, dict[int, int]]:
    """Returns the number of a job's newest start and the exit codes of its nodes; -1 before the
    first start.
    """
    started = contents.START.at(folder, job=job, start="*")
    names = [path.name.rpartition("-")[2] for path in started.parent.glob(started.name)]
    newest = max(
        (start for name in names if (start := untrusted_input.whole(name)) is not None), default=-1
    )
    return newest, exits_of(contents.START.at(folder, job=job, start=newest)) if newest >= 0 else {}


def exits_of(start: Path) -> dict[int, int]:
    """Returns node → exit code for the nodes of a start that have ended."""
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
    """Returns the size of each log at the beginning of a start, as the batch script recorded it (wc
    -c).
    """
    found = {}
    for line in _text(start / "logs").splitlines():
        size, _, name = line.strip().partition(" ")
        if (bytes_ := untrusted_input.whole(size)) is not None:
            found[Path(name)] = bytes_
    return found


def facts_of(start: Path, node: int) -> Path:
    """Returns the file with a node's facts in the folder of a start."""
    return start / f"facts-{node}"


def preflight_folder(start: Path) -> Path:
    """Returns the folder of the preflight's bandwidth test in the folder of a start."""
    return start / "gate"


def why_cancelled(folder: Path, job: str, start: int) -> str:
    """Returns why Slurm ended a start of a job, from slurmstepd's message on the first node; "" if
    Slurm did not end it.
    """
    words = rf"\*\*\* JOB {job} ON \S+ CANCELLED AT \S+(?: DUE TO [A-Z, ]+)? \*\*\*"
    said = re.findall(rf"(?m)^slurmstepd\S*: error: ({words})$", _said(folder, job, start))
    return "" if not said else said[-1] if "DUE TO" in said[-1] else f"slurm: job {job} CANCELLED"


def ends(folder: Path, job: str, start: int, nodes: int) -> list[int]:
    """Returns an exit code for each node that wrote none, from srun's messages. The code is KILLED
    if srun reports none.

    If srun ended the other nodes because one failed (--kill-on-bad-exit), nodes without a code get
    ENDED.
    """
    text, ending, _ = _said(folder, job, start).partition(f"Terminating StepId={job}.")
    codes: dict[int, int] = {}
    for tasks, words in re.findall(
        r"(?m)^srun: error: \S{1,200}: tasks? ([0-9,-]{1,200}): (.*)", text
    ):
        code = re.match("Exited with exit code ([0-9]{1,3})$", words)
        for first, last in re.findall(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", tasks):
            for node in range(int(first), min(int(last or first) + 1, nodes)):
                # The first code counts, because a later step only checks whether to continue.
                codes.setdefault(node, int(code[1]) if code else KILLED)
    return [codes.get(node, ENDED if ending else KILLED) for node in range(nodes)]


def _said(folder: Path, job: str, start: int) -> str:
    """Returns Slurm's messages about a start of a job; "" before the first start. The log also
    contains the messages of other jobs.
    """
    if start < 0:
        return ""
    log = run_folder.job_log(folder)
    return _text(log, lengths(contents.START.at(folder, job=job, start=start)).get(log, 0))


def _text(path: Path, offset: int = 0) -> str:
    """Returns a file's text from `offset` on; "" if it can't be read."""
    try:
        with untrusted_input.open_regular(path) as file:
            file.seek(offset)
            return file.read(LARGEST).decode(errors="replace")
    except (OSError, InputError):
        return ""
