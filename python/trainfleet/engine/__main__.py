"""Runs one rank of a training job: `python -m trainfleet.engine RUN_FOLDER`, started by torchrun.

The exit code is 0 if training finished or was stopped cleanly, and results.json records which. With
any other exit code, torchrun would kill ranks that are still shutting down. A failed run has a
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

import torch

from .. import devices
from ..config import Config, flat, load_resolved
from ..config.families import FAMILIES
from ..config.sizes import count_parameters, flops_in_words, flops_per_token
from ..data.dataset import Dataset
from ..health import faults, fence, lease
from ..health.heartbeat import Heart
from ..process.processes import SUPERVISOR, die_with_parent
from ..run import records, run_folder
from ..run.loggers import Loggers
from ..run.run_folder import Run
from ..storage import s3_sync_agent
from ..trust import untrusted_input
from ..trust.errors import RunError, TrainfleetError
from ..trust.safe_output import install
from . import generate
from .batches import samples_for
from .checkpoint import Checkpoints
from .record import Recorder, dataset_facts
from .timing import Slowest, StepProfiler, Stopwatch
from .trainer import Trainer
from .vote import NoticePoller, Vote
from .world import World, first_to_say, join

TRACEBACK_LINES = 12


def main(arguments: list[str]) -> int:
    loaded = time.time()
    die_with_parent(os.environ.get(SUPERVISOR))
    untrusted_input.stay()
    rank, node, order = (
        int(os.environ.get(name, "0")) for name in ("RANK", "GROUP_RANK", fence.VARIABLE)
    )
    run, number = Run(Path(arguments[0]), records.node(node, order)), 0
    try:
        number = (
            fence.enter(run.folder, order, int(os.environ.get(fence.AGAIN, "0")))
            if rank == 0
            else 0
        )
        heart = Heart(run.folder, rank, node, order, float(os.environ.get(lease.VARIABLE, "0")))
        config = load_resolved(run.config)
        with join(devices.planned(config.fleet.device)) as world:
            heart.meet(number := world.as_first_says(number))
            run.writer = records.node(node, number)
            heart.at("load")
            train(run, config, world, heart, {"loaded": loaded, "met": time.time()})
            heart.stop()
            return 0
    except fence.Fenced as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except TrainfleetError as error:
        record_fault(run, error, fence.Attempt(order, number))
        if first_to_say(str(error)):
            print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:
        record_fault(run, error, fence.Attempt(order, number))
        raise


def train(run: Run, config: Config, world: World, heart: Heart, moments: dict[str, float]) -> None:
    """Trains until the last step or until all ranks agree to stop.

    `moments` maps each completed startup stage to its Unix time.
    """
    profile = StepProfiler(run.profile, config.train.profile_steps if world.first else None)
    watch = Stopwatch(
        run.read_results().get("started") or moments["loaded"],
        heart,
        world.device.clock,
        profile.at,
    )
    watch.reached = {name: moment - watch.started for name, moment in moments.items()}
    # With S3 synchronization, each node has a separate run folder, so one rank per node checks for
    # the stop file.
    looks = world.first or (
        os.environ.get("LOCAL_RANK") == "0" and s3_sync_agent.BUCKET in os.environ
    )
    vote = Vote(run.stop if looks else None, world.tree("votes"))
    heart.alone = lambda seconds: leave_alone(run, vote, world, seconds)
    if config.fleet.spot and os.environ.get("LOCAL_RANK", "0") == "0":
        NoticePoller(lambda notice: on_notice(run, vote, world.node, notice))
    dataset = Dataset.open(run_folder.DATA / config.data.name, config.data)
    dataset.check_vocabulary(config.model.vocab_size)
    checkpoints = Checkpoints(run, config, dataset.identity, world)
    trainer = Trainer(config, samples_for(config, dataset), world, checkpoints, watch)
    faults.arm(run, trainer)
    recorder = open_record(run, config, trainer, dataset) if world.first else None
    print(greeting(trainer), flush=True)
    if recorder:
        print(formula(config, trainer), flush=True)
    status = trainer.fit(recorder, vote)
    vote.settle()
    profile.close()
    if recorder:
        conclude(run, trainer, recorder, dataset, status)


def on_notice(run: Run, vote: Vote, node: int, notice: str) -> None:
    """Makes all ranks save and exit because this node will be reclaimed soon."""
    vote.heard = True
    print(f"spot/instance-action: {notice}; all ranks save and exit", flush=True)
    run.note("notice", node=node, notice=notice)


def leave_alone(run: Run, vote: Vote, world: World, seconds: float) -> None:
    """Makes all ranks save and exit because no launcher is left to detect a hang.

    Each node records an `orphaned` event, unless the vote of another node stops it first.
    """
    vote.heard = True
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"no launcher for {seconds:.0f} s, and no standby took over; all ranks save and exit",
            flush=True,
        )
        run.note("orphaned", node=world.node, seconds=seconds)


def open_record(run: Run, config: Config, trainer: Trainer, dataset: Dataset) -> Recorder:
    """Creates the recorder and writes all metadata known before the first step to results.json."""
    world, train = trainer.world, config.train
    flops = flops_per_token(config.model, train.sequence_length)
    peak = world.device.peak_flops(trainer.precision) * world.size
    slowest = Slowest(trainer.watch.heart, world.size) if trainer.watch.heart else None
    recorder = Recorder(
        run,
        train,
        trainer.progress,
        trainer.watch,
        flops / peak,
        open_loggers(run, config),
        slowest,
    )
    recorder.update(
        name=config.name,
        status="running",
        versions=(run.read_results().get("versions") or {})
        | {"python": platform.python_version(), "torch": str(torch.__version__)},
        backend=config.fleet.backend,
        nodes=config.fleet.nodes,
        world_size=world.size,
        device=world.device.kind,
        device_name=world.device.name,
        precision=products(trainer),
        mfu_formula=formula(config, trainer),
        layout=config.degrees,
        model={"family": config.model.family, "parameters": count_parameters(config.model)},
        global_batch_sequences=train.global_batch_size,
        micro_batch_sequences=train.micro_batch_size,
        gradient_accumulation_steps=trainer.batches.per_step,
        sequence_length=train.sequence_length,
        total_steps=train.steps,
        **dataset_facts(config, dataset),
        restarts=run.read_results().get("restarts", 0),
    )
    return recorder


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
    """Returns the first log line of a rank: its number, device, batch size and start step."""
    world, train = trainer.world, trainer.train
    work = (
        f"{trainer.batches.per_step} micro-batches of {train.micro_batch_size} x "
        f"{train.sequence_length} tokens per step"
    )
    start = f"from step {trainer.progress.step}" if trainer.progress.step else "from the beginning"
    return f"rank {world.rank} of {world.size} on {world.device.name}: {work}, {start}"


def formula(config: Config, trainer: Trainer) -> str:
    """Returns an explanation of how MFU is computed, with this run's peak FLOP/s."""
    peak = (
        f"{trainer.world.size} x "
        f"{trainer.world.device.peak_flops(trainer.precision) / 1e12:,.4g} TFLOP/s per rank"
    )
    return (
        f"MFU = tokens/s x FLOPs per token / ({peak}, {products(trainer)}). "
        f"{flops_in_words(config.model)}"
    )


def products(trainer: Trainer) -> str:
    """Returns the name of the matmul dtype, which may be TF32 for fp32."""
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
    # If the device only traced its programs, they must still be compiled, so the status stays
    # "running".
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

    For an unexpected exception, the event includes the end of the traceback. If the disk is full,
    the error appears only in the log.

    Records nothing if a newer attempt has started, because this attempt's ranks then fail only as a
    result of other ranks exiting.
    """
    if attempt.number and fence.current(run.folder) > attempt:
        return
    is_ours = isinstance(error, TrainfleetError)
    lines = (
        []
        if is_ours
        else "".join(traceback.format_exception(error)).rstrip().splitlines()[-TRACEBACK_LINES:]
    )
    with suppress(RunError):
        run.record(
            "fault",
            order=int(os.environ.get(fence.VARIABLE, "0")),
            rank=int(os.environ.get("RANK", "0")),
            node=int(os.environ.get("GROUP_RANK", "0")),
            error=type(error).__name__,
            message=error.head if isinstance(error, TrainfleetError) else str(error),
            why=error.why if isinstance(error, TrainfleetError) else "",
            next=error.next if isinstance(error, TrainfleetError) else "",
            traceback=lines,
        )


if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
