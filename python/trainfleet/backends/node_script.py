"""Builds node scripts, which never contain secrets, and reads the secrets' values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..hardware.node_types import device_of
from ..health import fence
from ..node.placement import Placement, PlacementSource, torchrun
from ..node.placements.fleet import PLACEMENT
from ..node.precompile import ahead
from ..node.supervisor import EXIT, WATCH
from ..plan.job import Artifact, Job, script
from ..process.host_marker import JOB
from ..run import run_folder
from ..trust.errors import BackendError
from ..trust.redaction import NAMES

# environment variables passed to nodes in addition to those in the script
PASSED = (JOB, EXIT, WATCH, NAMES, fence.VARIABLE, fence.AGAIN)
# Passes whatever devices exist when the container starts, because their number depends on the
# instance type. Mounts the node's local disk if the dataset is copied to it (run_folder.COPY). The
# container runs as the user who trains, so that this user owns the files.
RUN = (
    'for device in /dev/neuron[0-9]* /dev/infiniband; do [ -e "$device" ] && set -- '
    '"--device=$device" "$@"; done; '
    '[ -z "${TRAINFLEET_COPY:-}" ] || set -- "--volume=$TRAINFLEET_COPY:$TRAINFLEET_COPY" "$@"; '
    'exec docker run --user "$(id -u):$(id -g)" --volume "$HOME/.trainfleet:$HOME/.trainfleet" "$@"'
)


def node_script(
    job: Job,
    placement: Placement,
    folder: Path | str,
    python: str,
    environment: Mapping[str, str],
    host: str = "",
    platform: str = "",
) -> Artifact:
    """Returns the script that starts a node.

    It exports the placement, from which the node builds its torchrun command, and shows that
    command in a comment. `platform` is the image's platform, for jobs with an image. The code
    always comes from the launcher, through the nodes' shared folder.
    """
    log = run_folder.node_log(job.folder, placement.node)
    heading = [
        f"{job.kind} {job.name}: node {placement.node} of "
        f"{placement.nodes}{f' on {host}' if host else ''}; its output goes to {log}"
    ]
    if job.torchrun:
        line = torchrun(placement, job.ranks_per_node, job.module, python, run_folder.scratch(log))
        heading.append(
            f"runs {' '.join([*(ahead(python, line) if job.ahead else line), *job.arguments])}"
        )
    words = [python, "-m", *entrypoint_words(job, PLACEMENT)]
    if job.image:
        words = container_words(
            job.image, str(folder), platform, (*environment, *job.secrets, *PASSED), words[2:]
        )
    return Artifact(f"node-{placement.node}.sh", script(heading, folder, environment, words))


def entrypoint_words(job: Job, engine: PlacementSource) -> list[str]:
    """Returns the arguments to `python -m` that start each node of a job, both on hosts and in
    images.
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
    """Reads the values of secrets from this process's environment.

    Also sets the variable NAMES to their names, so that the supervisor can mask the values in logs.

    Raises:
        BackendError: a variable is not set.
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
    image: str, folder: str, platform: str, names: Iterable[str], words: Sequence[str]
) -> list[str]:
    """Returns the command that runs `python -m words` in a container, inside the host's `folder`.

    The container inherits the variables in `names`, which keeps their values off the command line.
    EFA and NCCL require the host's network, the host's shared memory and unlimited locked memory.
    Docker forwards signals to the container.
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
    gpus = ["--gpus=all"] if device_of(platform) == "cuda" else []
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
