"""Entry point for each node of a job, on every backend. Host scripts, sbatch's srun and all images
start it.

    python -m trainfleet.node.entrypoint [--on SCHEDULER] --folder FOLDER [--ranks N [--ahead]]
    [--in HOME] [--wait SECONDS] -- MODULE...

--on SCHEDULER   scheduler that started this node: fleet (trainfleet itself, on a host), slurm,
                 batch, sagemaker, or one from another package; detected by default. The node's
                 placement is read from this scheduler's environment (node/placements.py)
--folder FOLDER  folder of the run or dataset, such as `runs/x`; the node log is
                 FOLDER/logs/node-<i>.log
--ranks N        number of ranks on which torchrun runs MODULE; with 0, the default, MODULE runs as
                 a single plain process
--ahead          ranks only record their computation, which is compiled after they exit
                 (node/precompile.py)
--in HOME        parent folder of FOLDER, runs/ and data/; created if missing
--wait SECONDS   maximum time to wait for nodes that have not started yet (node/barrier.py); 0 does
                 not wait

Environment variables:

TRAINFLEET_BUCKET, TRAINFLEET_RUN  see storage/s3_sync_agent.py
TRAINFLEET_SECRETS                 see trust/safe_output.py
TRAINFLEET_ATTEMPT                 see health/fence.py
TRAINFLEET_FAULT                   see health/faults.py
TRAINFLEET_WATCH                   number of ranks that this node watches if there is no launcher
TRAINFLEET_GRACE                   seconds from SIGTERM to SIGKILL, on machines that are configured
                                   to allow more than the scheduler's default
TRAINFLEET_LOCK                    versions in the job's plan; an image with other versions rejects
                                   the job

The exit code is that of the command, 128 + n if signal n killed it, or 69 if a node never arrived.
On SIGTERM, ranks are asked to save and exit. Remaining ranks are killed before the scheduler would
kill them. Batch and SageMaker also receive the node's output. SageMaker also receives the failure
reason, which DescribeTrainingJob shows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..health import fence
from ..health.heartbeat import read_end
from ..process.node_log import Log
from ..process.rdma_adapters import fastest, listed, ports_here
from ..run import records
from ..run.run_folder import COPY, MOUNTED, Run, make_folder, node_log, scratch
from ..storage.cloudwatch import forwarding
from ..storage.s3_sync_agent import BUCKET, uplink_for
from ..trust import secrets
from ..trust.errors import BackendError, InputError, RunError, TrainfleetError, tell, telling
from ..trust.redaction import hide
from ..trust.safe_output import visible
from . import placements, supervisor
from .exit_codes import ExitCodes, code_of
from .placement import Placement, PlacementSource, Terms, card, require_numbers, torchrun
from .precompile import ahead

# Per-node settings as templates, such as `GLOO_SOCKET_IFNAME=*` and `NCCL_IB_HCA==%infiniband`,
# because their values differ between nodes.
CARDS = "TRAINFLEET_CARDS"
# Placeholders in CARDS: the node's network card, and, if followed by a fabric's name, its ports on
# that fabric
CARD, PORTS = "*", "%"
GRACE = "TRAINFLEET_GRACE"
LOCK = "TRAINFLEET_LOCK"  # versions in the job's plan, if the job runs in an image
IMAGE_LOCK = "TRAINFLEET_IMAGE_LOCK"  # versions in this process's image (docker/Dockerfile)
VERDICT = 90.0  # maximum seconds to wait for a verdict
# EX_TEMPFAIL in sysexits.h: a node's exit code if the verdict says that a retry may succeed
AGAIN = 75
LAST = 1 << 16  # bytes at the end of a log to search for its last lines
REASON = 1024  # maximum characters of a failure reason, as limited by DescribeTrainingJob


@telling
def main(arguments: list[str]) -> int:
    options = parse(arguments)
    # A container's first process has no default handler for SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return supervisor.run_part(lambda: run_node(options))


USAGE = " ".join((__doc__ or "").split("\n\n")[1].split())


@dataclass(frozen=True)
class Options:
    """Parsed command line."""

    engine: PlacementSource
    folder: Path
    ranks: int
    home: Path
    wait: float
    command: tuple[str, ...]
    ahead: bool = False

    @property
    def terms(self) -> Terms:
        return self.engine.terms


def parse(arguments: Sequence[str]) -> Options:
    """Parses a command line. If it is invalid, exits with argparse's message and exit code 2."""
    arguments = list(arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser("trainfleet.node.entrypoint", usage=USAGE, allow_abbrev=False)
    parser.add_argument("--on", type=_engine)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--in", dest="home", type=Path, default=Path())
    parser.add_argument("--wait", type=float)
    given, command = parser.parse_args(arguments[:cut]), tuple(arguments[cut + 1 :])
    if not command or given.ranks < 0:
        parser.error("no module after --" if not command else "--ranks must be 0 or more")
    engine = given.on or placements.here()
    wait = engine.terms.wait if given.wait is None else given.wait
    return Options(engine, given.folder, given.ranks, given.home, wait, command, given.ahead)


def _engine(name: str) -> PlacementSource:
    try:
        return placements.source(name)
    except BackendError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_node(options: Options) -> int:
    """Reads the placement, waits for the other nodes, runs the command and returns its exit
    code.
    """
    secrets.take()
    placement = options.engine.read()
    make_folder(options.home)
    os.chdir(options.home)
    log = Log(
        node_log(options.folder, placement.node),
        sys.stdout.fileno() if options.terms.echoes else None,
    )
    command = command_of(options, placement)
    decides = options.terms.decides and BUCKET in os.environ
    with (
        reporting_failure(options, placement, log) as outcome,
        supervisor.on_own_disk(scratch(log.path)),
        uplink_for(log.path),
        forwarding(log.path),
    ):
        require_numbers(fence.VARIABLE, fence.AGAIN, supervisor.WATCH, GRACE, "WORKERS")
        copy_dataset(options, log)
        await_nodes(options, placement, log)
        began = time.time()
        grace = float(os.environ.get(GRACE, options.terms.grace))
        outcome.code = supervisor.run(log, command, grace)
        if decides:
            outcome.code = exit_code_of(options, placement, log, outcome.code, began)
    if decides:
        outcome.code = leave_together(options, placement, log, outcome.code)
    return outcome.code


def leave_together(options: Options, placement: Placement, log: Log, code: int) -> int:
    """Waits until this node may exit, and returns its exit code. Only node 0 waits for the other
    nodes, unless it failed.
    """
    if placement.nodes == 1:
        return code
    exit_codes = ExitCodes(*in_s3(options, placement))
    if placement.node:
        # When node 0 exits, the scheduler sends SIGTERM to this node, which has already finished.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        exit_codes.publish(placement.node, code, partial(log.note, "node"))
        return code
    return code or code_of(
        code, exit_codes.collect(placement.nodes, partial(log.note, "node")), AGAIN
    )


def in_s3(options: Options, placement: Placement) -> tuple[str, str]:
    """Returns the S3 URL of the run's or dataset's folder, and a unique name for this job
    attempt.
    """
    attempt = f"{os.environ.get('AWS_BATCH_JOB_ID', '').partition('#')[0]}-{placement.attempt}"
    return f"{os.environ[BUCKET].rstrip('/')}/{options.folder}", attempt


def exit_code_of(options: Options, placement: Placement, log: Log, code: int, began: float) -> int:
    """Returns the exit code to give a scheduler that decides on retries by exit code: AGAIN if the
    verdict says that a retry may succeed, otherwise `code`. Only node 0 judges.

    A separate program derives the verdict from the logs and events of all nodes
    (watch/node_verdict.py).
    """
    if not options.ranks or placement.node or not 0 < code < 128:
        return code
    words = [
        sys.executable,
        "-m",
        "trainfleet.watch.node_verdict",
        str(options.folder),
        str(placement.nodes),
        str(code),
        str(began),
    ]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=VERDICT, check=False)
    except subprocess.TimeoutExpired:
        log.note("node", f"no verdict within {VERDICT:.0f} s")
        return code
    for line in filter(None, (answer.stdout + answer.stderr).splitlines()):
        log.note("node", line)
    return AGAIN if answer.returncode == AGAIN else code


def command_of(options: Options, placement: Placement) -> list[str]:
    """Returns the node's command line. If the module runs without torchrun, also sets the placement
    in the environment.
    """
    module, *words = options.command
    # Use the scheduler's retry count, because trainfleet's count restarts with each request.
    if options.engine.name != placements.FLEET.name:
        os.environ[fence.AGAIN] = str(placement.attempt - 1)
    if options.ranks:
        os.environ |= {
            name: value for name, value in found_here().items() if name not in os.environ
        }
        log = node_log(options.folder, placement.node)
        line = torchrun(placement, options.ranks, module, sys.executable, scratch(log))
        return [*(ahead(sys.executable, line) if options.ahead else line), *words]
    os.environ.update(NODE_RANK=str(placement.node), NODES=str(placement.nodes))
    return [sys.executable, "-m", module, *words]


def found_here() -> dict[str, str]:
    """Returns the settings in CARDS, filled in with this node's network card and ports. Omits
    settings for which the node has no card or port.
    """
    found, known = {}, card()
    for setting in os.environ.get(CARDS, "").split():
        name, _, value = setting.partition("=")
        text, _, fabric = value.partition(PORTS)
        ports = listed(fastest(ports_here(), fabric)) if fabric else ""
        if (known or CARD not in text) and (ports or not fabric):
            found[name] = text.replace(CARD, known) + ports
    return found


def copy_dataset(options: Options, log: Log) -> None:
    """Copies the dataset to this node's disk if the job requests it. If the copy fails, the reason
    is logged and the ranks read from S3.
    """
    if not options.ranks or COPY not in os.environ:
        return
    words = [
        sys.executable,
        "-m",
        "trainfleet.data.local_copy",
        str(options.folder),
        os.environ[COPY],
    ]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    for line in answer.stderr.splitlines():
        log.note("node", line)
    if answer.returncode == 0:
        os.environ[MOUNTED] = answer.stdout.strip()


def require_lock() -> None:
    """Raises BackendError if the versions in this image differ from those in the job's plan."""
    planned, own = os.environ.get(LOCK), os.environ.get(IMAGE_LOCK)
    if planned and own and planned != own:
        raise BackendError(
            "the image's versions differ from those of the config's platform",
            why=f"its versions are {own}, but the config's platform has {planned}",
            next="set fleet.container: build, then run make push",
        )


def await_nodes(options: Options, placement: Placement, log: Log) -> None:
    """Waits until all nodes have arrived, if their ranks rendezvous through torchrun. Logs missing
    nodes and records them as a fault event.

    Raises:
        BackendError: nodes are missing or can't connect, or this node's image has other versions.
    """
    attempt = int(os.environ.get(fence.VARIABLE, "0"))
    try:
        require_lock()
        if options.ranks and options.wait:
            from .barrier import wait_for_all  # imports asyncio

            say = partial(log.note, "node")
            wait_for_all(placement, str(options.folder), options.wait, say)
    except BackendError as error:
        log.note("node", " ".join(str(error).split()))
        if options.ranks:
            run = Run(options.folder, records.node(placement.node, attempt))
            run.note(
                "fault",
                order=attempt,
                rank=None,
                node=placement.node,
                error=type(error).__name__,
                message=error.head,
                why=error.why,
                next=error.next,
            )
        raise


@contextlib.contextmanager
def reporting_failure(options: Options, placement: Placement, log: Log) -> Iterator[PartOutcome]:
    """If the `with` block fails, writes the reason to the scheduler's failure file, if there is
    one.
    """
    outcome = PartOutcome()
    try:
        yield outcome
    except TrainfleetError as error:
        outcome.code = error.exit_code
        outcome.words = str(error)
        raise
    finally:
        if options.terms.failure and outcome.code:
            words = outcome.words or reason_of(
                options.folder, placement.node, log.path, outcome.code
            )
            write_reason(options.terms.failure, f"node {placement.node}: {words}")


@dataclass
class PartOutcome:
    """Result of a node's part, for `reporting_failure`. The code is 1 until the part has ended."""

    code: int = 1
    words: str = ""


def reason_of(folder: Path, node: int, log: Path, code: int) -> str:
    """Returns why this node failed: the error of its first failed rank, or else the last lines of
    its log.
    """
    with contextlib.suppress(RunError, ValueError, OSError):
        faults = [
            event
            for event in Run(folder).read_events()
            if event["event"] == "fault" and event.get("node") == node
        ]
        newest = [fault for fault in faults if fault.get("order") == faults[-1].get("order")]
        if newest:
            fault = newest[0]
            words = f"{fault['error']}: {fault['message']}" + (
                f"\n  why: {fault['why']}" if fault.get("why") else ""
            )
            return words + (f"\n  next: {fault['next']}" if fault.get("next") else "")
    with contextlib.suppress(OSError, InputError):
        return f"exit code {code}; its last lines:\n" + "\n".join(
            read_end(log, LAST).splitlines()[-5:]
        )
    return f"exit code {code}"


def write_reason(file: Path, words: str) -> None:
    """Writes the reason to the scheduler's failure file. If that fails, only the log contains the
    reason.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(visible(hide(words))[:REASON], encoding="utf-8")
    except OSError as error:
        tell(
            RunError(
                "can't write the failure reason",
                where=str(file),
                why=error.strerror or str(error),
            )
        )


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
