"""What a node receives: its script, and the values of secrets, which are in no script."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..hardware.node_types import device_of
from ..health import fence
from ..node.placement import Seat, Seating, torchrun
from ..node.placements.fleet import SEATING
from ..node.precompile import ahead
from ..node.supervisor import EXIT, WATCH
from ..plan.job import Job
from ..plan.request import Artifact, script
from ..process.host_marker import JOB
from ..run import run_folder
from ..trust.errors import BackendError
from ..trust.redaction import NAMES

# what a node gets beside its script
PASSED = (JOB, EXIT, WATCH, NAMES, fence.VARIABLE, fence.AGAIN)
# The devices that are there at start are given over, as their number follows from the instance
# type; so is the node's own disk where the dataset is copied to it (runs.COPY); files belong to who
# trains.
RUN = (
    'for device in /dev/neuron[0-9]* /dev/infiniband; do [ -e "$device" ] && set -- '
    '"--device=$device" "$@"; done; '
    '[ -z "${TRAINFLEET_COPY:-}" ] || set -- "--volume=$TRAINFLEET_COPY:$TRAINFLEET_COPY" "$@"; '
    'exec docker run --user "$(id -u):$(id -g)" --volume "$HOME/.trainfleet:$HOME/.trainfleet" "$@"'
)


def node_script(
    job: Job,
    seat: Seat,
    folder: Path | str,
    python: str,
    environment: Mapping[str, str],
    host: str = "",
    stack: str = "",
) -> Artifact:
    """A node's script: it takes its seat, and builds its line from that; the line stands in it, to
    be read.

    `stack`: of the image, where the job has one. Its code is the launcher's all the same, from the
    folder that the nodes share.
    """
    log = run_folder.node_log(job.folder, seat.node)
    heading = [
        f"{job.kind} {job.name}: node {seat.node} of "
        f"{seat.nodes}{f' on {host}' if host else ''}; its output goes to {log}"
    ]
    if job.torchrun:
        line = torchrun(seat, job.ranks_per_node, job.module, python, run_folder.scratch(log))
        heading.append(
            f"runs {' '.join([*(ahead(python, line) if job.ahead else line), *job.arguments])}"
        )
    words = [python, "-m", *entrypoint_words(job, SEATING)]
    if job.image:
        words = container_words(
            job.image, str(folder), stack, (*environment, *job.secrets, *PASSED), words[2:]
        )
    return Artifact(f"node-{seat.node}.sh", script(heading, folder, environment, words))


def entrypoint_words(job: Job, engine: Seating) -> list[str]:
    """What every node of a job is started with behind `python -m`, which is also what an image does
    with its arguments.
    """
    ranks = ["--ranks", str(job.ranks_per_node)] if job.torchrun else []
    how = ["--ahead"] if job.ahead else []
    return [
        "trainfleet.node.entrypoint",
        "--on",
        engine.name,
        "--folder",
        str(job.folder),
        *ranks,
        *how,
        "--",
        job.module,
        *job.arguments,
    ]


def values_of(names: Iterable[str]) -> dict[str, str]:
    """The values from this process's environment, and their names for the supervisor, which masks
    them in what it logs.

    Raises:
        BackendError: one is not set.
    """
    names = tuple(names)
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise BackendError(
            f"{', '.join(missing)} is not set",
            where="fleet.secrets",
            next=f"export {missing[0]}=...",
        )
    found = {name: os.environ[name] for name in names}
    return found | ({NAMES: ",".join(found)} if found else {})


def container_words(
    image: str, folder: str, stack: str, names: Iterable[str], words: Sequence[str]
) -> list[str]:
    """The command that runs `python -m words` in an image: in `folder`, where it sees what the host
    sees, and nothing else of it.

    `names`: the variables that it gets, whose values stand in no word. The network, shared memory
    and locked memory are the host's, as EFA and NCCL need them. What the container is asked by a
    signal, Docker passes on.
    """
    own = [
        "--rm",
        "--network=host",
        "--ipc=host",
        "--ulimit=memlock=-1",
        "--ulimit=nofile=65536",
        "--env=HOME=/tmp",
        "--env=USER=trainer",
    ]
    gpus = ["--gpus=all"] if device_of(stack) == "cuda" else []
    passed = [f"--env={name}" for name in sorted(set(names))]
    return [
        "sh",
        "-c",
        RUN,
        "docker",
        *own,
        *gpus,
        f"--volume={folder}:{folder}",
        f"--workdir={folder}",
        *passed,
        image,
        *words,
    ]
