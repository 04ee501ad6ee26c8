"""How fast a verb that starts no job answers, through make: `python tests/bench/bench_verbs.py` in a clone where make setup ran.

Medians of whole-process wall seconds, the verbs in turn, so that a slow moment of the machine meets all of them alike.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

VERBS = (
    "help",
    "plan",
    "status",
    "logs",
    "stop",
    "tokenize",
)  # tokenize: of a dataset that is there already
ROUNDS = 7
LIMIT = 0.5


def measure(verb: str) -> float:
    began = time.perf_counter()
    subprocess.run(
        ["make", "-s", verb], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
    return time.perf_counter() - began


def imports_torch(verb: str) -> bool:
    """Whether the verb's process loads torch, by Python's own list of imports."""
    done = subprocess.run([".venv/bin/python", "-X", "importtime", "-m", "trainfleet", verb], env={"PYTHONPATH": "python"},
                          capture_output=True, text=True, check=False)  # fmt: skip
    return any(line.rpartition("|")[2].strip() == "torch" for line in done.stderr.splitlines())


def main() -> int:
    if not Path("runs").exists():
        sys.exit("run `make train` first, so that there is something to look at")
    seconds: dict[str, list[float]] = {verb: [] for verb in VERBS}
    for _ in range(ROUNDS):
        for verb in VERBS:
            seconds[verb].append(measure(verb))
    for verb, taken in seconds.items():
        torch = (
            "" if verb == "help" else "  imports torch!" if imports_torch(verb) else "  no torch"
        )
        print(f"{verb:9} median {statistics.median(taken):.3f} s  worst {max(taken):.3f} s{torch}")
    return int(any(statistics.median(taken) > LIMIT for taken in seconds.values()))


if __name__ == "__main__":
    sys.exit(main())
