"""Runs one rank of a training job: `python -m trainfleet.engine RUN_FOLDER`, started by torchrun.

The exit code is 0 if training finished or was stopped cleanly, and results.json records which. With
any other exit code, torchrun would kill ranks that are still shutting down. A failed run records a
`fault` event.
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .. import devices
from ..config import Config, flat, load_resolved
from ..config.families import FAMILIES
from ..config.sizes import count_parameters, flops_in_words, flops_per_token
from ..data.dataset import Dataset
from ..health import faults, fence, lease
from ..health.heartbeat import Heart
from ..process.processes import SUPERVISOR, die_with_parent
from ..run import records
from ..run.loggers import Loggers
from ..run.run_folder import Run
from ..storage import s3_sync_agent
from ..trust import untrusted_input
from ..trust.errors import RunError, TrainfleetError
from ..trust.safe_output import install
from . import generate
from .batches import open_dataset, samples_for
from .checkpoint import Checkpoints
from .record import Recorder, dataset_facts
from .timing import Slowest, StepProfiler, Stopwatch
from .trainer import Trainer
from .vote import NoticePoller, Vote
from .world import World, first_of_node, first_to_say, join

TRACEBACK_LINES = 12


def main(arguments: list[str]) -> int:
    loaded = time.time()
    die_with_parent(os.environ.get(SUPERVISOR))
    untrusted_input.stay()
    rank, node, order, again = map(given, ("RANK", "GROUP_RANK", fence.VARIABLE, fence.AGAIN))
    run, number = Run(Path(arguments[0]), records.node(node, order)), 0
    try:
        if rank == 0:
            number = fence.enter(run.folder, order, again)
        heart = Heart(run.folder, rank, node, order, float(os.environ.get(lease.VARIABLE, "0")))
        config = load_resolved(run.config)
        with join(devices.planned(config.fleet.device)) as world:
            heart.meet(number := world.as_first_says(number))
            run.writer = records.node(node, number)
            heart.at("load")
            train(run, config, world, heart, loaded)
            heart.stop()
            return 0
    except Exception as error:
        record_fault(run, error, fence.Attempt(order, number))
        if not isinstance(error, TrainfleetError):
            raise
        return error.exit_code


def given(name: str) -> int:
    """Returns the number in an environment variable, or 0 if it is not set."""
    return int(os.environ.get(name, "0"))


def train(run: Run, config: Config, world: World, heart: Heart, loaded: float) -> None:
    """Trains until the last step or until all ranks agree to stop.

    `loaded` is the Unix time at which the rank finished importing the program.
    """
    profile = StepProfiler(run.profile, config.train.profile_steps if world.first else None)
    started = run.read_results().get("started") or loaded
    watch = Stopwatch(started, heart, world.device.clock, profile.at)
    watch.reached = {"loaded": loaded - started, "met": watch.total}
    vote = open_vote(run, config, world, heart)
    dataset = open_dataset(config)
    checkpoints = Checkpoints(run, config, dataset.identity, world)
    trainer = Trainer(config, samples_for(config, dataset), world, checkpoints, watch)
    faults.arm(run, trainer)
    print(greeting(trainer))
    recorder = open_record(run, trainer, dataset) if world.first else None
    status = trainer.fit(recorder, vote)
    vote.settle()
    profile.close()
    if recorder:
        conclude(run, trainer, recorder, dataset, status)


def open_vote(run: Run, config: Config, world: World, heart: Heart) -> Vote:
    """Starts listening for stop requests: signals, the stop file, spot interruption notices, and
    the loss of the launcher.
    """
    # With S3 synchronization, each node has a separate run folder, so one rank per node checks for
    # the stop file.
    looks = world.first or (first_of_node() and s3_sync_agent.BUCKET in os.environ)
    vote = Vote(run.stop if looks else None, world.tree("votes"))
    heart.alone = lambda seconds: leave_alone(run, vote, world, seconds)

    def reclaimed(notice: str) -> None:
        vote.heard = True
        print(f"spot/instance-action: {notice}; all ranks save and exit")
        run.note("notice", node=world.node, notice=notice)

    if config.fleet.spot and first_of_node():
        NoticePoller(reclaimed)
    return vote


def leave_alone(run: Run, vote: Vote, world: World, seconds: float) -> None:
    """Makes all ranks save and exit, because no launcher is left to detect a hang.

    Each node records an `orphaned` event, unless another node's vote stops it first.
    """
    vote.heard = True
    if first_of_node():
        print(f"no launcher for {seconds:.0f} s, and no standby took over; all ranks save and exit")
        run.note("orphaned", node=world.node, seconds=seconds)


def open_record(run: Run, trainer: Trainer, dataset: Dataset) -> Recorder:
    """Creates the recorder and writes the run's initial metadata to results.json."""
    config, world, watch = trainer.config, trainer.world, trainer.watch
    peak = world.device.peak_flops(trainer.precision) * world.size
    load = flops_per_token(config.model, config.train.sequence_length) / peak
    loggers = open_loggers(run, config)
    slowest = Slowest(watch.heart, world.size) if watch.heart else None
    recorder = Recorder(run, config.train, trainer.progress, watch, load, loggers, slowest)
    before = run.read_results()
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    recorder.update(
        status="running",
        versions=(before.get("versions") or {}) | versions,
        restarts=before.get("restarts", 0),
        **description(trainer, dataset),
    )
    print(formula(trainer))
    return recorder


def description(trainer: Trainer, dataset: Dataset) -> dict[str, Any]:
    """Returns the results.json fields that stay constant during an attempt."""
    config, world, train = trainer.config, trainer.world, trainer.train
    return {
        "name": config.name,
        "backend": config.fleet.backend,
        "nodes": config.fleet.nodes,
        "world_size": world.size,
        "device": world.device.kind,
        "device_name": world.device.name,
        "precision": products(trainer),
        "mfu_formula": formula(trainer),
        "layout": config.degrees,
        "model": {"family": config.model.family, "parameters": count_parameters(config.model)},
        "global_batch_sequences": train.global_batch_size,
        "micro_batch_sequences": train.micro_batch_size,
        "gradient_accumulation_steps": trainer.batches.per_step,
        "sequence_length": train.sequence_length,
        "total_steps": train.steps,
        **dataset_facts(config, dataset),
    }


def open_loggers(run: Run, config: Config) -> Loggers | None:
    """Opens the loggers listed in `train.loggers`.

    A resumed run keeps its logger IDs, so each service appends to the existing run.
    """
    if not config.train.loggers:
        return None
    identity = run.read_results().get("identity") or f"{run.name}-{secrets.token_hex(4)}"
    run.update_results(identity=identity)

    def failed(service: str, why: str) -> None:
        run.note("logger-failed", service=service, message=why)

    return Loggers(
        config.train.loggers, run.name, identity, dict(flat(asdict(config))), run.folder, failed
    )


def greeting(trainer: Trainer) -> str:
    """Returns a rank's first log line: rank, device, batch size and starting step."""
    world, train = trainer.world, trainer.train
    work = (
        f"{trainer.batches.per_step} micro-batches of {train.micro_batch_size} x "
        f"{train.sequence_length} tokens per step"
    )
    start = f"from step {trainer.progress.step}" if trainer.progress.step else "from the beginning"
    return f"rank {world.rank} of {world.size} on {world.device.name}: {work}, {start}"


def formula(trainer: Trainer) -> str:
    """Describes how MFU is computed, with this run's peak FLOP/s."""
    peak = (
        f"{trainer.world.size} x "
        f"{trainer.world.device.peak_flops(trainer.precision) / 1e12:,.4g} TFLOP/s per rank"
    )
    return (
        f"MFU = tokens/s x FLOPs per token / ({peak}, {products(trainer)}). "
        f"{flops_in_words(trainer.config.model)}"
    )


def products(trainer: Trainer) -> str:
    """Returns the name of the matmul dtype. For fp32, this may be TF32."""
    return (
        trainer.device.single
        if trainer.precision == torch.float32
        else str(trainer.precision).removeprefix("torch.")
    )


def conclude(run: Run, trainer: Trainer, recorder: Recorder, dataset: Dataset, status: str) -> None:
    """Records the final status and a text sample from the model, then removes the stop file."""
    step = trainer.progress.step
    if trainer.watch.heart:
        trainer.watch.heart.at("conclude", step)
    config, executes = trainer.config, trainer.device.executes
    writes = (
        status == "finished"
        and executes
        and not config.checkpoint.is_off
        and FAMILIES[config.model.family].causal
    )
    sample = {"sample": write_sample(run, trainer, dataset)} if writes else {}
    recorder.close(status)
    # A tracing-only device has yet to compile its programs, so the status stays "running".
    recorder.update(status=status if executes else "running", **sample)
    run.record(status, step=step)
    run.stop.unlink(missing_ok=True)


def write_sample(run: Run, trainer: Trainer, dataset: Dataset) -> dict[str, str] | None:
    """Generates a text sample with the trained model.

    Returns None if the output is not finite, or if a sharded model is too large for one rank.
    """
    model = trainer.parts.whole
    if model is None:
        if count_parameters(trainer.config.model) * 4 > trainer.device.memory_bytes() / 4:
            return None
        # each rank holds only part of the model, so load the last checkpoint
        model = generate.load(run)[0]
    # Run in eager mode, because torch.compile would recompile for each sequence length.
    with suppress(FloatingPointError), torch.compiler.set_stance("force_eager"):
        return generate.write_sample(model.eval(), dataset, trainer.train.seed)
    return None


def record_fault(run: Run, error: Exception, attempt: fence.Attempt) -> None:
    """Records a `fault` event with the rank and the error.

    A TrainfleetError is also printed, once across all ranks. For any other exception, the event
    includes the end of the traceback. If the disk is full, the error appears only in the log.

    Records nothing if this rank was fenced or a newer attempt has started, because the error is
    then only a consequence of other ranks exiting.
    """
    if isinstance(error, TrainfleetError):
        lines, message, why, remedy = list[str](), error.head, error.why, error.next
        if first_to_say(str(error)):
            print(error, file=sys.stderr)
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
        lines = text.splitlines()[-TRACEBACK_LINES:]
        message = str(error)
        why = ""
        remedy = ""
    is_over = attempt.number and fence.current(run.folder) > attempt
    if is_over or isinstance(error, fence.Fenced):
        return
    with suppress(RunError):
        run.record(
            "fault",
            order=attempt.order,
            rank=given("RANK"),
            node=given("GROUP_RANK"),
            error=type(error).__name__,
            message=message,
            why=why,
            next=remedy,
            traceback=lines,
        )


if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
