"""Builds the scripts (for hosts) and request bodies (for AWS Batch and SageMaker) that start a
job's nodes, without secrets. Also reads the secrets' values.

Request bodies are artifacts, so a plan shows the exact requests. Three values are added only when a
request is sent: the job name (which contains the request token), the attempt's environment
variables, and the job's number within its launch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cloud.template_parts import fill
from ..config import Config
from ..config.tables import read_table
from ..hardware import node_types
from ..health import fence
from ..hosts.install_steps import lock_name
from ..hosts.platform import load_platform
from ..node.entrypoint import LOCK
from ..node.placement import Placement, PlacementSource, torchrun
from ..node.placements import FLEET as PLACEMENT
from ..node.precompile import ahead
from ..node.supervisor import EXIT, WATCH
from ..plan.fabric_environment import NCCL_LOGS, fabric_environment
from ..plan.job import Artifact, Job, Request, script
from ..process.processes import JOB
from ..run import run_folder
from ..run.records import require_object
from ..storage.s3_sync_agent import BUCKET, RUN
from ..trust import untrusted_input
from ..trust.errors import BackendError
from ..trust.redaction import NAMES

# environment variables passed to nodes in addition to those in the script
PASSED = (JOB, EXIT, WATCH, NAMES, fence.VARIABLE, fence.AGAIN)
# Passes whatever devices exist when the container starts, because their number depends on the
# instance type. Mounts the node's local disk if the dataset is copied to it (run_folder.COPY). The
# container runs as the user who trains, so that this user owns the files.
DOCKER = (
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
    gpus = ["--gpus=all"] if node_types.device_of(platform) == "cuda" else []
    passed = [f"--env={name}" for name in sorted(set(names))]
    return [
        "sh",
        "-c",
        DOCKER,
        "docker",
        *own,
        *gpus,
        f"--volume={folder}:{folder}",
        f"--workdir={folder}",
        *passed,
        image,
        *words,
    ]


# Network interface in the container. Batch gives each container of a multi-node job its own
# interface (awsvpc), and SageMaker documents this name.
CARD = "eth0"
TOKEN = r"[0-9a-f]{16}"
Body = dict[str, Any]


FORMS = read_table(Path(__file__).with_name("requests.yaml"))


def form(name: str, **values: Any) -> Any:
    """Returns an entry of requests.yaml, filled with `values` (see `fill`)."""
    return fill(FORMS[name], **values)


def artifact(number: int, service: str, operation: str, body: Body) -> Artifact:
    """Returns the request body as a file.

    Once a job name is added, `aws <service> <operation> --cli-input-json` accepts it.
    """
    return Artifact(
        f"requests/{number:02}-{service}-{operation}.json",
        json.dumps(body, indent=2, ensure_ascii=False) + "\n",
    )


def bodies(request: Request) -> tuple[Body, ...]:
    """Returns the request bodies in the order in which they are sent."""
    return tuple(
        require_object(untrusted_input.parse_json(artifact.text, artifact.name))
        for artifact in request.artifacts
    )


def environment(config: Config, job: Job) -> dict[str, str]:
    """Returns the environment variables that all nodes of a job share."""
    row = node_types.INSTANCE_TYPES[config.fleet.instance_type or ""]
    own = {BUCKET: config.fleet.shared_folder or "", RUN: config.name}
    if job.torchrun:
        own |= NCCL_LOGS if row.efa and job.nodes > 1 and row.kind == "cuda" else {}
        own |= fabric_environment(row, CARD, alone=job.nodes == 1)
        own |= {"OMP_NUM_THREADS": str(max(1, row.vcpus // 2 // job.ranks_per_node))}
    else:
        own["WORKERS"] = str(row.vcpus)
    if job.image:
        own[LOCK] = lock_name(load_platform(config.fleet.platform))
    if job.secrets:
        own[NAMES] = ",".join(job.secrets)
    return own | dict(job.environment)


def pairs(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Converts an environment to the list of name-value pairs that AWS Batch expects."""
    return [{"name": name, "value": value} for name, value in sorted(environment.items())]
