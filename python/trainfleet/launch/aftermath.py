"""Decides whether to requeue a job that ended without a launcher: `python -m
trainfleet.launch.aftermath FOLDER START NEAR`.

A Slurm job's batch script runs this module on the first node (backends/slurm/sbatch.py). FOLDER is
the job's folder, and START is its subfolder for the current start. NEAR is non-empty if the job was
close to its time limit. Exit code 0 requeues the job.

A running launcher makes this decision instead, based on the same verdict (watch/retry_loop.py),
unless the time limit was near. The launcher also picks up jobs that this module has requeued.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ..backends import job_starts
from ..backends.base import Phase, Status, load_job
from ..health.lease import is_held, is_renewed, read_holder
from ..plan.job import Request
from ..run.run_folder import Run
from ..trust import safe_output
from ..trust.errors import telling
from ..watch.causes import Then
from ..watch.monitor import AttemptOutcome
from ..watch.retry_loop import conclude, worth_it
from ..watch.verdict import Start, judge

AGAIN, OVER = 0, 1


@telling
def main(arguments: list[str]) -> int:
    folder, start, near = Path(arguments[0]), Path(arguments[1]), arguments[2]
    run, exits = Run(folder, f"launcher-{start.name}"), job_starts.exits_of(start)
    if run.is_asked_to_stop():
        return say(OVER, "the job was asked to stop")
    job = load_job(run)
    if near:
        done = run.read_results().get("status") == "finished" if job else not any(exits.values())
        return (
            say(OVER, "the job is finished")
            if done
            else say(AGAIN, "the job reached its time limit and is queued again")
        )
    if job is None or is_held(read_holder(folder), time.time()) or is_renewed(folder):
        return say(OVER, "the launcher decides whether to retry")
    return AGAIN if is_worth_it(run, job[1], exits, start) else OVER


def is_worth_it(run: Run, request: Request, exits: dict[int, int], start: Path) -> bool:
    """Returns whether another start could succeed. Records and prints the verdict behind the
    decision.
    """
    status = Status(Phase.ENDED, exits=exits)
    verdict = judge(
        request,
        AttemptOutcome(status, None),
        run,
        Start(start.stat().st_ctime, job_starts.lengths(start)),
    )
    again = verdict.then is Then.HERE and worth_it(verdict, fruitless(run) + 1, run)
    print(conclude(run, verdict, "queued again" if again else "ended"))
    if not again:
        run.update_results(status="failed")
    if again:
        restarts = int(run.read_results().get("restarts", 0)) + 1
        run.update_results(restarts=restarts)
        run.note(
            "restarted",
            attempt=restarts,
            cause=verdict.cause,
            who=verdict.who,
            nodes=request.job.nodes,
            hosts=[],
        )
    return again


def fruitless(run: Run) -> int:
    """Returns the number of restarts since the newest checkpoint."""
    events = [event["event"] for event in run.read_events()]
    last = max((place for place, event in enumerate(events) if event == "checkpointed"), default=-1)
    return events[last + 1 :].count("restarted")


def say(code: int, words: str) -> int:
    print(f"trainfleet: {words}")
    return code


if __name__ == "__main__":
    safe_output.install()
    sys.exit(main(sys.argv[1:]))
