"""How right the verdict is on both halves of its corpus, on the logs that no rule was ever tuned to, and how long it takes.

    .venv/bin/python tests/bench/bench_verdict.py

Precision: of the causes named, how many are right; recall: of the failures, how many are named rightly; placed: of those, the
right node and rank; fooled: healthy logs in which a failure was seen. The halves are split by source (verdict_cases.py); `never
tuned to` is the part of the judging half that the rules have met at judging only: each file's first sight is in LOG.md.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "unit"), str(Path(__file__).parents[2] / "python")]

from verdict_cases import (  # noqa: E402
    Case,
    read_cases,
    score,
    with_counters,
    with_skew,
    without_kernel,
    without_ranks,
    without_stamps,
)

from trainfleet.watch.diagnosis import diagnose  # noqa: E402
from trainfleet.watch.lines import parse  # noqa: E402

CHANGES = {"as they are": lambda case: case, "kernel's log closed": with_counters, "no counters either": without_kernel,
           "no prefixes of ranks": without_ranks, "clocks 20 s apart": with_skew, "no stamps at all": without_stamps}  # fmt: skip
RANKS, FRAMES = 10_000, 20


def main() -> None:
    cases = read_cases()
    print(
        f"{'':36}{'logs':>5}{'healthy':>9}{'precision':>11}{'recall':>8}{'placed':>8}{'sure':>6}{'wrong and sure':>16}{'fooled':>8}"
    )
    for half in (False, True):
        for name, change in CHANGES.items():
            tell(
                "judging" if half else "tuned",
                name,
                [case for case in cases if case.judging is half],
                change,
            )
    for name in sorted({case.file for case in cases if case.untouched}):
        tell(
            "never tuned to",
            name,
            [case for case in cases if case.file == name],
            CHANGES["as they are"],
        )
    seconds, lines = crowd()
    print(
        f"\n{RANKS:,} tracebacks on {RANKS // 8:,} nodes, {lines:,} lines: {seconds:.1f} s of CPU"
    )


def tell(half: str, name: str, cases: list[Case], change) -> None:  # type: ignore[no-untyped-def]
    """A line of the table."""
    found = score(cases, change)
    healthy = found.cases - found.failures
    print(f"{half + ', ' + name:36}{found.cases:5}{healthy:9}{found.precision:11.3f}{found.recall:8.3f}{found.placed:8}"
          f"{found.sure:6}{len(found.wrong_and_sure):16}{len(found.fooled):8}")  # fmt: skip
    if change is CHANGES["as they are"] and half != "never tuned to":
        print("".join(f"    {wrong}\n" for wrong in found.wrong), end="")


def crowd() -> tuple[float, int]:
    """Seconds of CPU for a verdict on a job all of whose ranks left a traceback, and its lines."""
    logs: dict[int, list[str]] = {}
    for rank in range(RANKS):
        head = f"rank {rank}  10:{rank // 60 % 60:02d}:{rank % 60:02d}.000 | "
        frames = [f'{head}  File "/w/{frame}.py", line {frame}, in f' for frame in range(FRAMES)]
        end = f"RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.77.{rank % 250}.4]:{rank}"
        logs.setdefault(rank // 8, []).extend(
            [f"{head}Traceback (most recent call last):", *frames, f"{head}{end}"]
        )
    began = time.process_time()
    lines = [line for node, mine in logs.items() for line in parse(mine, node)]
    diagnose(lines)
    return time.process_time() - began, len(lines)


if __name__ == "__main__":
    main()
