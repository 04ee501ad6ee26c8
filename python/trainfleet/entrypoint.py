"""A node's part of a job, wherever the node is: what scripts on hosts, sbatch's srun and every image start.

    python -m trainfleet.entrypoint [--on ENGINE] --folder FOLDER [--ranks N [--ahead]] [--in HOME] [--wait SECONDS] -- MODULE...

--on ENGINE      who started this node: fleet (this program, on a host), slurm, batch or sagemaker. Left out, it is found out. The
                 node's seat is read as that engine tells it (seat.py)
--folder FOLDER  the run's or the dataset's, as `runs/x`: the node's log is FOLDER/logs/node-<i>.log
--ranks N        torchrun's line for N ranks of MODULE is built from the seat; 0, the default: one plain process of MODULE
--ahead          its ranks only record what they would compute; it is compiled when they have left (ahead.py)
--in HOME        the folder that FOLDER, runs/ and data/ are in; made where it is not there
--wait SECONDS   how long ranks wait for the nodes that have not come yet (muster.py); 0: not at all

The environment tells the rest: TRAINFLEET_BUCKET, TRAINFLEET_RUN (uplink.py), TRAINFLEET_SECRETS (output.py), TRAINFLEET_ATTEMPT
(fence.py), TRAINFLEET_WATCH (watchdog over so many ranks, where no launcher sees them), TRAINFLEET_GRACE (seconds from SIGTERM
until nothing may be left, where machines were made to give more than their engine does by itself), TRAINFLEET_LOCK (the versions
that the job was planned for: an image of others refuses it).

The exit code is the command's own: 128 + n for a signal, 69 when a node never came. SIGTERM asks the ranks to save and leave, and
ends what is left before the engine would. What the engine keeps gets what the node has to say too: Batch and SageMaker its
output, SageMaker the reason of a failure, which DescribeTrainingJob shows.
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
from pathlib import Path

from . import events, fence, supervisor, vault
from .ahead import ahead
from .courier import courier
from .errors import BackendError, RunError, TrainfleetError, tell, telling
from .muster import muster
from .output import hide, visible
from .parting import Parting, code_of
from .runs import COPY, MOUNTED, Run, make_folder, node_log, scratch
from .seat import READERS, Seat, card, engine, torchrun
from .supervisor import Log
from .uplink import BUCKET, carrier

CARDS = "TRAINFLEET_CARDS"  # settings that name the node's network card, as `GLOO_SOCKET_IFNAME=*`
GRACE = "TRAINFLEET_GRACE"
LOCK = "TRAINFLEET_LOCK"  # the versions that the job was planned for, where it runs in an image
IMAGE_LOCK = "TRAINFLEET_IMAGE_LOCK"  # those of the image that this is in (docker/Dockerfile)
STARTS = 900.0  # seconds between an engine's first node and its last: machines boot, images are pulled
VERDICT = 90.0  # seconds in which a node has its own verdict, at most
AGAIN = 75  # sysexits.h: a temporary failure
REASON = 1024  # characters of a failure's reason, of which DescribeTrainingJob shows no more


@dataclass(frozen=True)
class Terms:
    """How an engine treats its nodes.

    wait     seconds in which all nodes have to come; 0 where who launched them has seen to that
    grace    seconds from SIGTERM until nothing may be left, a few less than the engine gives
    echoes   whether it keeps what its nodes print
    failure  the file for the reason of a failure
    decides  whether its first node decides for all: the job ends when that one does, and is started again by its exit code,
             which is AGAIN where another attempt may go well
    """

    wait: float = STARTS
    grace: float = supervisor.TERM_GRACE
    echoes: bool = False
    failure: Path | None = None
    decides: bool = False


TERMS = {
    "fleet": Terms(wait=0),
    "slurm": Terms(),  # KillWait is 30 s by default
    "batch": Terms(echoes=True, decides=True),  # 30 s: https://docs.aws.amazon.com/batch/latest/userguide/job_timeouts.html
    # 120 s: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_StoppingCondition.html
    "sagemaker": Terms(grace=110, echoes=True, failure=Path("/opt/ml/output/failure")),
}


@telling
def main(arguments: list[str]) -> int:
    order = parse(arguments)
    return supervisor.ending(lambda: carry_out(order))


@dataclass(frozen=True)
class Order:
    """A command line, read."""

    reader: str
    folder: Path
    ranks: int
    home: Path
    wait: float
    command: tuple[str, ...]
    ahead: bool = False

    @property
    def terms(self) -> Terms:
        return TERMS[self.reader]


def parse(arguments: Sequence[str]) -> Order:
    """The order of a command line; argparse's own message and exit code 2 where it is none."""
    arguments = list(arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser("trainfleet.entrypoint", usage=(__doc__ or "").splitlines()[2].strip(), allow_abbrev=False)
    parser.add_argument("--on", choices=sorted(READERS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--in", dest="home", type=Path, default=Path())
    parser.add_argument("--wait", type=float)
    given, command = parser.parse_args(arguments[:cut]), tuple(arguments[cut + 1 :])
    if not command or given.ranks < 0:
        parser.error("no module behind --" if not command else "--ranks is less than 0")
    reader = given.on or engine()
    wait = TERMS[reader].wait if given.wait is None else given.wait
    return Order(reader, given.folder, given.ranks, given.home, wait, command, given.ahead)


def carry_out(order: Order) -> int:
    """Takes the seat, waits for the others, and runs the command to its end; its exit code."""
    vault.take()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as a container's first process it has no default
    seat = READERS[order.reader]()
    make_folder(order.home)
    os.chdir(order.home)
    log = Log(node_log(order.folder, seat.node), sys.stdout.fileno() if order.terms.echoes else None)
    command = command_of(order, seat)
    with reasoned(order, seat, log) as outcome, supervisor.on_own_disk(scratch(log.path)), carrier(log.path), courier(log.path):
        copy_dataset(order, log)
        gather(order, seat, log)
        began = time.time()
        outcome.code = supervisor.run(log, command, float(os.environ.get(GRACE, order.terms.grace)))
        if order.terms.decides and order.ranks and seat.node == 0 and BUCKET in os.environ and 0 < outcome.code < 128:
            outcome.code = judged(order, seat, log, outcome.code, began)
    if order.terms.decides and seat.nodes > 1 and BUCKET in os.environ:
        outcome.code = part(order, seat, log, outcome.code)
    return outcome.code


def part(order: Order, seat: Seat, log: Log, code: int) -> int:
    """The exit code once a node may leave: any at once, but the first after the others, where it has not failed itself."""
    attempt = f"{os.environ.get('AWS_BATCH_JOB_ID', '').partition('#')[0]}-{seat.attempt}"
    parting = Parting(f"{os.environ[BUCKET].rstrip('/')}/{order.folder}", attempt)
    if seat.node:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once it has left, the first node's end stops it, and it has done its part
        parting.leave(seat.node, code, lambda words: log.note("node", words))
        return code
    return code or code_of(code, parting.gather(seat.nodes, lambda words: log.note("node", words)), AGAIN)


def judged(order: Order, seat: Seat, log: Log, code: int, began: float) -> int:
    """The exit code for an engine that has others to go by: AGAIN where the verdict is that another attempt may go well.

    The verdict is made by a program of its own (watch/alone.py), which reads what all nodes have said.
    """
    words = [sys.executable, "-m", "trainfleet.watch.alone", str(order.folder), str(seat.nodes), str(code), str(began)]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=VERDICT, check=False)
    except subprocess.TimeoutExpired:
        log.note("node", f"no verdict came in {VERDICT:.0f} s")
        return code
    for line in filter(None, (answer.stdout + answer.stderr).splitlines()):
        log.note("node", line)
    return AGAIN if answer.returncode == AGAIN else code


def command_of(order: Order, seat: Seat) -> list[str]:
    """The words of the node's command; the environment says its seat to what is no torchrun's."""
    module, *words = order.command
    if order.reader != "fleet":  # an engine's own count of how often it started this; ours begins anew with each request
        os.environ[fence.AGAIN] = str(seat.attempt - 1)
    if (known := card()) and order.ranks:
        for setting in os.environ.get(CARDS, "").split():
            name, _, value = setting.partition("=")
            os.environ.setdefault(name, value.replace("*", known))
    if order.ranks:
        log = node_log(order.folder, seat.node)
        line = torchrun(seat, order.ranks, module, sys.executable, scratch(log))
        return [*(ahead(sys.executable, line) if order.ahead else line), *words]
    os.environ.update(NODE_RANK=str(seat.node), NODES=str(seat.nodes))
    return [sys.executable, "-m", module, *words]


def copy_dataset(order: Order, log: Log) -> None:
    """Brings the dataset to this node's own disk where the job says so. Where that fails ranks read S3, and the log says why."""
    if not order.ranks or COPY not in os.environ:
        return
    words = [sys.executable, "-m", "trainfleet.data.replica", str(order.folder), os.environ[COPY]]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    for line in answer.stderr.splitlines():
        log.note("node", line)
    if answer.returncode == 0:
        os.environ[MOUNTED] = answer.stdout.strip()


def require_lock() -> None:
    """BackendError when the image that this is in was built from other versions than the job was planned for."""
    planned, own = os.environ.get(LOCK), os.environ.get(IMAGE_LOCK)
    if planned and own and planned != own:
        why = f"it is of the lock {own}, the config's stack of {planned}"
        raise BackendError(
            "the image has other versions than the config's stack", why=why, next="make push, with fleet.image: build"
        )


def gather(order: Order, seat: Seat, log: Log) -> None:
    """Waits until all nodes of ranks that have to meet are there; who is missing stands in the log, and in the run's events.

    Raises:
        BackendError: they did not come, can't meet, or this one's image does not fit.
    """
    attempt = int(os.environ.get(fence.VARIABLE, "0"))
    try:
        require_lock()
        if order.ranks and order.wait:
            muster(seat, str(order.folder), order.wait, lambda words: log.note("node", words))
    except BackendError as error:
        log.note("node", " ".join(str(error).split()))
        if order.ranks:
            run = Run(order.folder, events.node(seat.node, attempt))
            run.note("fault", order=attempt, rank=None, node=seat.node, error=type(error).__name__, message=error.head,
                     why=error.why, next=error.next)  # fmt: skip
        raise


@contextlib.contextmanager
def reasoned(order: Order, seat: Seat, log: Log) -> Iterator[Outcome]:
    """Where the engine asks for it, a node's part that fails leaves its reason, however it fails."""
    outcome = Outcome()
    try:
        yield outcome
    except TrainfleetError as error:
        outcome.code, outcome.words = error.exit_code, str(error)
        raise
    finally:
        if order.terms.failure and outcome.code:
            words = outcome.words or reason(order.folder, seat.node, log.path, outcome.code)
            leave(order.terms.failure, f"node {seat.node}: {words}")


@dataclass
class Outcome:
    """How a node's part ended, for `reasoned`; 1 is of what came to no end."""

    code: int = 1
    words: str = ""


def reason(folder: Path, node: int, log: Path, code: int) -> str:
    """Why this node's part failed: what its rank that failed first said of itself, or else the last lines of its log."""
    with contextlib.suppress(RunError, ValueError, OSError):
        faults = [event for event in Run(folder).read_events() if event["event"] == "fault" and event.get("node") == node]
        newest = [fault for fault in faults if fault.get("order") == faults[-1].get("order")]
        if newest:
            told = newest[0]
            words = f"{told['error']}: {told['message']}" + (f"\n  why: {told['why']}" if told.get("why") else "")
            return words + (f"\n  next: {told['next']}" if told.get("next") else "")
    with contextlib.suppress(OSError):
        return f"exit code {code}; its last lines:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    return f"exit code {code}"


def leave(file: Path, words: str) -> None:
    """Leaves the reason where the engine reads it; where that can't be written, it is in the log alone."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(visible(hide(words))[:REASON], encoding="utf-8")
    except OSError as error:
        tell(RunError("the reason of the failure can't be left", where=str(file), why=error.strerror or str(error)))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
