"""Runs of the real trainer with witnesses, some killed on the way: `python killing.py SEED PLAN.json`.

PLAN is a list of [ranks, run folder, "whole" or "killed", the config to give it first or ""]. A killed run loses all its ranks at
once, by SIGKILL, at a random moment, and is then trained again by the same command. The engine is imported once, every rank is a fork of this program, and each leaves
in the run's folder `witness/`:

batches-<rank>.txt            a line `step place digest` for each sequence that it was given, by its place in the global batch
state-<step>-<n>-<rank>.pt    every whole tensor of the state that it resumed at that step, as it has it after the resume
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ranks
import torch
from torch.distributed.tensor import DTensor

import trainfleet.engine.__main__  # noqa: F401  imported once, before the forks
from trainfleet.engine.batches import Batches
from trainfleet.engine.checkpoint import Checkpoints, TrainingProgress
from trainfleet.engine.parallel import Parts


def witness_batches() -> None:
    take = Batches._take

    def witnessed(batches: Batches, step: int) -> Any:
        tokens = take(batches, step)
        digests = [hashlib.sha1(sequence.tobytes()).hexdigest() for sequence in tokens]
        with open(f"{os.environ['WITNESS']}/batches-{os.environ['RANK']}.txt", "a") as file:
            file.writelines(
                f"{step} {batches.offset + place} {digest}\n"
                for place, digest in enumerate(digests)
            )
        return tokens

    Batches._take = witnessed  # type: ignore[method-assign]


def witness_states() -> None:
    resume = Checkpoints.resume

    def witnessed(checkpoints: Checkpoints, parts: Parts) -> TrainingProgress:
        progress = resume(checkpoints, parts)
        if progress.step:
            found = dict(ranks.leaves("", parts.state()))
            whole = {
                name: value.full_tensor() if isinstance(value, DTensor) else value
                for name, value in found.items()
            }
            paths = (
                Path(
                    os.environ["WITNESS"], f"state-{progress.step}-{n}-{checkpoints.peers.rank}.pt"
                )
                for n in itertools.count()
            )
            torch.save(whole, next(path for path in paths if not path.exists()))
        return progress

    Checkpoints.resume = witnessed  # type: ignore[method-assign]


def start(size: int, run: Path) -> list[int]:
    """The process ids of the ranks."""
    os.environ["WITNESS"] = str(run / "witness")
    (run / "witness").mkdir(exist_ok=True)
    port = str(ranks.free_port())
    return [ranks.fork(rank, size, port, str(run)) for rank in range(size)]


def finish(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def kill(children: list[int], run: Path, chance: random.Random) -> int:
    """Kills all ranks at a random moment of a random step that is not the last few; the step that was logged last."""
    goal, fraction = chance.randint(2, 9), chance.random()
    first = await_step(run, 1)  # what comes before it takes far longer than a step
    time.sleep(fraction * (await_step(run, goal) - first) / (goal - 1))
    for child in children:
        os.kill(child, signal.SIGKILL)
    finish(children)
    return logged(run)


def await_step(run: Path, step: int) -> float:
    """When a step was seen to have been logged."""
    began = time.monotonic()
    while logged(run) < step:
        assert time.monotonic() - began < 120, f"{run.name} logs nothing"
        time.sleep(0.001)
    return time.monotonic()


def logged(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def main(chance: random.Random, plan: list[tuple[int, str, str, str]]) -> None:
    torch.set_num_threads(1)
    witness_batches()
    witness_states()
    for size, folder, kind, config in plan:
        run = Path(folder)
        if config:
            shutil.copy(config, run / "config.yaml")
        killed_at = kill(start(size, run), run, chance) if kind == "killed" else 0
        told = {
            "run": run.name,
            "killed_at": killed_at,
            "codes": finish(start(size, run)),
            "resumed": bool(ranks.events(run, "resumed")),
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(random.Random(int(sys.argv[1])), json.loads(Path(sys.argv[2]).read_text()))
