"""AWS Batch and SageMaker request bodies as artifacts, so that a plan shows the exact requests.
Pure.

Three values are added only when a request is sent: the job name (which contains the request token),
the attempt's environment variables, and the job's number within its launch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..config import Config
from ..hardware import node_types
from ..hosts.install_steps import lock_name
from ..hosts.platform import load_platform
from ..node.entrypoint import LOCK
from ..plan.fabric_environment import NCCL_LOGS, fabric_environment
from ..plan.job import Artifact, Job, Request
from ..run.records import require_object
from ..storage.s3_sync_agent import BUCKET, RUN
from ..trust import untrusted_input
from ..trust.redaction import NAMES

# Network interface in the container. Batch gives each container of a multi-node job its own
# interface (awsvpc), and SageMaker documents this name.
CARD = "eth0"
TOKEN = r"[0-9a-f]{16}"
Body = dict[str, Any]


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
