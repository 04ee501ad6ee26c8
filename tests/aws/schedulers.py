"""A site for the schedulers' backends: the pretended account with AWS Batch and SageMaker, nodes in namespaces, a local S3 server.

with site(folder) as place:
    place.account, place.batch, place.sagemaker, place.cluster, place.watched
    place.config("batch")      the least of a config for it, as keys
    place.environment          for processes that run elsewhere.py
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.cluster import Cluster
from conformance.cluster import site as nodes_and_bucket
from requirement import missing
from trainfleet.cloud import calls

from . import cloudformation, compute, elsewhere, limits, logs, storage, watchers  # noqa: F401  what they answer
from .account import Account
from .batch import Batch
from .containers import ML, Containers
from .sagemaker import SageMaker

QUEUE, KIND, VCPUS = "mine", "c7i.8xlarge", 32
ROLE = f"arn:aws:iam::{Account.number}:role"


@dataclass
class Site:
    account: Account
    cluster: Cluster
    batch: Batch
    sagemaker: SageMaker
    watched: watchers.Watched
    environment: dict[str, str]

    @property
    def containers(self) -> Containers:
        return self.batch.containers

    def fleet(self, backend: str) -> dict[str, Any]:
        """The keys of `fleet` with which a config has its jobs run here."""
        own: dict[str, dict[str, Any]] = {
            "batch": {
                "queue": QUEUE,
                "job_role": f"{ROLE}/train",
                "execution_role": f"{ROLE}/train-execution",
            },
            "sagemaker": {"role": f"{ROLE}/train"},
        }
        return {
            "backend": backend, "instance_type": KIND, "container": "registry.example/trainfleet:cpu",
            "shared_folder": "s3://bucket/some", "aws": {"region": "us-east-1"}, backend: own[backend],
        }  # fmt: skip


@contextmanager
def site(folder: Path, nodes: int = 2) -> Iterator[Site]:
    with (
        nodes_and_bucket(folder, nodes) as cluster,
        _mount_point(cluster),
        pytest.MonkeyPatch.context() as patch,
    ):
        cluster.environment |= {"OMP_NUM_THREADS": "1", "WORKERS": "1"}
        account = Account()
        watched, containers = watchers.Watched(account), Containers(cluster)
        batch, sagemaker = Batch(account, containers), SageMaker(account, containers)
        batch.queue_of_mine(QUEUE, KIND, nodes * VCPUS)
        watched.quotas[f"ml.{KIND} for training job usage"] = nodes
        patch.setattr(calls, "send", account.respond)
        calls._client.cache_clear()  # of another server
        with elsewhere.served(account) as where:
            yield Site(account, cluster, batch, sagemaker, watched, {elsewhere.VARIABLE: where})
        batch.close()
        sagemaker.close()


@contextmanager
def _mount_point(cluster: Cluster) -> Iterator[None]:
    """The place of a container's /opt/ml, on which each binds its own."""
    if not (cluster.isolated and os.geteuid() == 0 and shutil.which("unshare")):
        missing("containers as SageMaker's need mount namespaces: root, and unshare of util-linux")
    made = not ML.exists()
    ML.mkdir(parents=True, exist_ok=True)
    yield
    if made:
        ML.rmdir()
