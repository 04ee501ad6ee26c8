"""Searches for the fastest micro-batch that fits: `train.search_micro_batch`.

Each size is tried by processes of their own, one beside each rank (`python -m trainfleet.engine.micro_batch RUN SIZE FILE`). They
take a few steps of the real training, on its devices, layout and data, and end. So nothing of it is left in the run: no weights,
no random numbers, no memory in pieces, no half of a collective. A size that does not fit ends its own processes, even where the
system kills for memory, while the ranks look on and agree.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .. import devices
from ..config import Config, load_resolved
from ..config.layouts import sizes_to_try
from ..config.memory import memory_of
from ..data.dataset import Dataset
from ..health.heartbeat import Heart
from ..host.processes import die_with_parent
from ..run import run_folder
from ..run.records import Search
from ..run.run_folder import Record, Run, read_json, remedy, write_atomic
from ..trust.errors import RunError
from ..trust.safe_output import install
from ..trust.validation import fit
from .batches import samples_for
from .checkpoint import Checkpoints
from .timing import Stopwatch
from .trainer import Trainer
from .vote import Vote
from .world import World, join

PROGRAM = ("-m", "trainfleet.engine.micro_batch")
TOO_LARGE = 12  # a trial's exit code (ENOMEM)
STEPS, SETTLED = 4, 2  # of a trial; those before `settled` compile, and allocate the optimizer's state
FULL = 0.95  # of a device: beyond it a size counts as too large, as validation and what fragments need room too
ERRING = 1.25  # config/memory.py reckons at most so many times what is needed (tests/bench/LOG.md): beyond it nothing is tried
LOOK_EVERY = 0.2  # seconds
PATIENCE = 15  # looks at a failure


@dataclass(frozen=True)
class Trial:
    """The outcome of one micro-batch; `seconds` is None where it does not fit."""

    micro_batch: int
    seconds: float | None = None  # of a step
    tokens_per_second: float = 0.0  # of all ranks
    memory_bytes: int = 0  # of the fullest rank

    def __str__(self) -> str:
        if self.seconds is None:
            return f"micro-batch {self.micro_batch}: does not fit"
        memory = f"{self.memory_bytes / 2**30:,.2f} GiB per rank"
        return f"micro-batch {self.micro_batch}: {self.tokens_per_second:,.0f} tokens/s, {memory}"


def settle(run: Run, config: Config, world: World, heart: Heart, vote: Vote) -> Config:
    """The config with the micro-batch that this run found, now or at an earlier start of the same layout. All ranks call it.

    A request to stop ends the search, and nothing of it is kept.

    Raises:
        RunError: a trial failed, and not for memory.
    """
    ground = ground_of(config, world)
    kept = fit(Search, read_json(run.search) or {}, str(run.search), remedy(run.search)) if world.first else {}
    known: list[Any] = [kept.get("micro_batch") if kept.get("ground") == ground else None]
    dist.broadcast_object_list(known, src=0)  # rank 0's word: the folder may be its own, and its device's name too
    if known[0]:
        return with_size(config, known[0])
    trials = list(search(run, config, world, heart, vote))
    best = fastest(trials)
    if best is None:
        return config
    if world.first:
        found = {"micro_batch": best.micro_batch, "trials": [asdict(trial) for trial in trials], "ground": ground}
        write_atomic(run.search, json.dumps(found, indent=2) + "\n")
        tell(
            run,
            "searched",
            f"micro-batch {best.micro_batch} is the fastest that fits of {', '.join(str(t.micro_batch) for t in trials)}",
        )
    return with_size(config, best.micro_batch)


def ground_of(config: Config, world: World) -> Record:
    """All that the fastest micro-batch depends on, as JSON."""
    train = config.train
    asked = (
        train.global_batch,
        train.sequence_length,
        train.optimizer,
        train.precision,
        train.weights,
        train.recompute,
        train.compile,
        train.separate_documents,
    )
    device = f"{world.size} x {world.device.name}, {world.precision(train.precision)}"
    found: Record = json.loads(
        json.dumps({"device": device, "train": asked, "layout": asdict(train.layout), "model": asdict(config.model)})
    )
    return found


def with_size(config: Config, size: int) -> Config:
    return replace(config, train=replace(config.train, micro_batch=size))


def fastest(trials: list[Trial]) -> Trial | None:
    """The trial of most tokens per second; None where there was none."""
    return max((trial for trial in trials if trial.seconds), key=lambda trial: trial.tokens_per_second, default=None)


def search(run: Run, config: Config, world: World, heart: Heart, vote: Vote) -> Iterator[Trial]:
    """Tries sizes in order, until one does not fit, or two in a row are no faster than the best so far."""
    trials: list[Trial] = []
    for size in within_reach(config, world):
        heart.at("compile", size)  # a trial's first step may take as long
        trial = attempt(run, size, world, vote)
        if trial is None:
            return
        if world.first:
            tell(run, "tried", str(trial))
        yield trial
        trials.append(trial)
        best = fastest(trials)
        if trial.seconds is None or (best and size >= 4 * best.micro_batch):
            break
    if not fastest(trials):
        raise RunError(
            f"micro-batch {trials[0].micro_batch} does not fit", where=f"run {run.name}",
            why=f"a rank has {least_memory(world) / 2**30:.1f} GiB",
            next="train.recompute=full, a shorter train.sequence_length, or more nodes: make plan",
        )  # fmt: skip


def within_reach(config: Config, world: World) -> list[int]:
    """The sizes that fit by the memory model, and at least the smallest."""
    sizes, half = sizes_to_try(config), world.precision(config.train.precision) != torch.float32
    room = ERRING * least_memory(world)
    return [size for size in sizes if size == sizes[0] or memory_of(with_size(config, size), half).total <= room]


def least_memory(world: World) -> float:
    """Bytes of the smallest device of any rank."""
    memory = torch.tensor(world.device.memory_bytes(), dtype=torch.float64)
    dist.all_reduce(memory, dist.ReduceOp.MIN)
    return float(memory)


def attempt(run: Run, size: int, world: World, vote: Vote) -> Trial | None:
    """The outcome of one size, the same on all ranks; None where a rank was asked to stop.

    Raises:
        RunError: the trial failed on a rank, for another reason than memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "trial.json"
        process = subprocess.Popen([sys.executable, *PROGRAM, str(run.folder), str(size), str(result)])
        stopped, failed, full = look_on(process, world, vote)
        if stopped:
            return None
        if failed:
            raise RunError(
                f"the trial of micro-batch {size} failed", where=f"run {run.name}", why="its own words are above",
                next="make logs; train.search_micro_batch=false trains without a search",
            )  # fmt: skip
        trial = None if full else fit(Trial, read_json(result) or {}, str(result))
    return Trial(size) if trial is None or trial.memory_bytes > FULL * least_memory(world) else trial


def look_on(process: subprocess.Popen[bytes], world: World, vote: Vote) -> tuple[bool, bool, bool]:
    """Whether any rank was asked to stop, any trial failed, any ran out of memory. All trials have ended when it returns.

    When one rank lacks memory, the others lose a peer and may fail visibly first: so the cause is awaited for a while.
    """
    looks = PATIENCE
    while True:
        time.sleep(LOOK_EVERY)
        code = process.poll()
        full = code in (TOO_LARGE, -signal.SIGKILL)
        votes = torch.tensor([code is None, vote.look(), bool(code) and not full, full], dtype=torch.float32)
        running, stopped, failed, lacking = (bool(count) for count in world.sum(votes).tolist())
        looks -= failed
        if stopped or lacking or not (running or failed) or not looks:
            process.kill()
            process.wait()
            return stopped, failed and not lacking, lacking


def tell(run: Run, event: str, message: str) -> None:
    run.record(event, message=message)
    print(message, flush=True)


def main(arguments: list[str]) -> int:
    """A rank's part of a trial."""
    die_with_parent()
    run, size, file = Run(Path(arguments[0])), int(arguments[1]), Path(arguments[2])
    config = load_resolved(run.config)
    device = devices.planned(config.fleet.device)
    try:
        with join(device, apart=f"try-{size}") as world:
            write_atomic(file, json.dumps(asdict(measure(config, size, world))))
    except (RuntimeError, MemoryError) as error:
        if device.is_full(error):
            return TOO_LARGE
        raise
    return 0


def measure(config: Config, size: int, world: World) -> Trial:
    """Times a few steps from the beginning, of as many sequences for every size; all ranks return the same."""
    config = with_size(shortened(config), size)
    dataset = Dataset.open(run_folder.DATA / config.data.name, config.data)
    with tempfile.TemporaryDirectory() as folder:  # nothing is saved in it
        checkpoints = Checkpoints(Run(Path(folder)), config, dataset.identity, world)
        trainer = Trainer(config, samples_for(config, dataset), world, checkpoints, Stopwatch(time.time()))
    seconds = []
    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        trainer.advance(step)
        world.device.synchronize()
        seconds.append(time.perf_counter() - began)
    worst = torch.tensor([min(seconds[SETTLED:]), world.device.memory_used()], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    slowest, memory = worst.tolist()
    return Trial(size, slowest, config.train.global_batch * config.train.sequence_length / slowest, int(memory))


def shortened(config: Config) -> Config:
    """The config of a trial, with steps just long enough to compare sizes.

    That is two passes of the largest, so that gradients are added up where they are in the run; in a pipeline the whole step, as
    its length decides for how long ranks idle.
    """
    ways, train = config.data_parallel, config.train
    part = train.global_batch // ways
    if train.layout.pipeline == 1:
        part = min(part, 2 * sizes_to_try(config)[-1])
    checkpoint = replace(config.checkpoint, destination=None)
    return replace(config, train=replace(train, global_batch=part * ways, init_from=None), checkpoint=checkpoint)


def leave(arguments: list[str]) -> NoReturn:
    """Ends the process with main's exit code at once; threads of a collective that others are still in would be waited for."""
    code = 1
    try:
        code = main(arguments)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    install()
    leave(sys.argv[1:])
