"""How long set-up and teardown take, for estimates: minutes by stage, and where they come from.

AWS documents none of these times, and none was measured in an account (2026-11-23), so a plan calls them assumed. What is
known: how long SageMaker took to download large images in job logs that were published (github.com/huggingface/blog/pull/96,
2.5 min; github.com/NVIDIA-Merlin/Transformers4Rec/issues/794, 2.9 min), and that it does not charge for finding machines
(github.com/aws/sagemaker-python-sdk/pull/30).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..config import Config
from ..plan.bill import BillStage
from .template_storage import has_file_system

ASSUMED = "assumed"
STACK, FILE_SYSTEM = 4.0, 10.0  # minutes until a stack is made, and until one with a file system is
HOST_KEYS = 5.0  # until AWS shows what a console said at boot; set-up waits for ten at most (backends/ec2_machines.py)
DRIVER = {"cuda": 6.0, "neuron": 5.0, "neuron_xla": 5.0}  # by device
EFA = 4.0
ENVIRONMENT = 5.0  # 34 s were measured with wheels at hand (tests/bench/LOG.md); the rest is their download
BOOT = 5.0  # of an engine's machine, until it takes a job
NODE_BOOT = 8.0  # of ParallelCluster's, with node.sh
IMAGE = 4.0
START = 3.0  # from a launch to the first step: ranks load torch, meet, and build the model
UPLOAD = 2.0
ENGINE_IDLE = 10.0  # until Batch ends an instance that has nothing to do
UNLIMITED = 60.0  # until make clean, where nodes stay until then


@dataclass(frozen=True)
class Times:
    """The stages before training and after it, and the hours for which nodes are paid after a launch."""

    before: tuple[BillStage, ...]
    after: tuple[BillStage, ...]
    lingers: float


def of_ec2(config: Config) -> Times:
    """Every node is paid for from the making of the stack on."""
    fleet, kind = config.fleet, config.fleet.node_type

    def stages() -> Iterator[BillStage]:
        made = has_file_system(config)
        yield BillStage("stack and file system" if made else "stack", FILE_SYSTEM if made else STACK, ASSUMED)
        yield BillStage("boot and host keys", HOST_KEYS, ASSUMED)
        if fleet.device in DRIVER:
            yield BillStage("driver", DRIVER[fleet.device], ASSUMED)
        if kind and kind.efa and fleet.nodes > 1:
            yield BillStage("EFA", EFA, ASSUMED)
        if not fleet.python:
            yield BillStage("Python environment", ENVIRONMENT, ASSUMED)
        yield _start()

    return Times(tuple(stages()), *_idle(config))


def of_batch(config: Config) -> Times:
    """Batch starts machines for a job, and ends them some minutes after it."""
    own = [] if config.fleet.batch.queue else [BillStage("stack", STACK, ASSUMED, nodes=False)]
    before = (*own, BillStage("boot", BOOT, ASSUMED), _image(), _start())
    return Times(before, (BillStage("idle machines", ENGINE_IDLE, ASSUMED),), ENGINE_IDLE / 60)


def of_sagemaker(config: Config) -> Times:
    """SageMaker charges from the download of the image on, and for a warm pool after the job."""
    warm = config.fleet.sagemaker.warm_pool_minutes or 0
    after = [BillStage("upload", UPLOAD, ASSUMED)]
    if warm:
        after.append(BillStage("warm pool", warm, "fleet.sagemaker.warm_pool_minutes"))
    return Times((_image(), _start()), tuple(after), warm / 60)


def of_cluster(config: Config, static: bool) -> Times:
    """ParallelCluster starts nodes for a job, and ends them when they were idle; `static`: those of the job are always there."""
    before = (
        BillStage("cluster and head", FILE_SYSTEM, ASSUMED, nodes=static),
        *([] if config.fleet.python else [BillStage("Python environment", ENVIRONMENT, ASSUMED, nodes=static)]),
        BillStage("boot of the nodes", NODE_BOOT, ASSUMED, counted=True),
        _start(),
    )
    after, lingers = _idle(config)
    if static:
        return Times(before, (BillStage("until make clean", UNLIMITED, ASSUMED),), math.inf)
    return Times(before, after, lingers)


def _idle(config: Config) -> tuple[tuple[BillStage, ...], float]:
    """What follows training where nodes go by themselves when they are idle, and for how many hours they are paid."""
    minutes = config.fleet.idle_minutes
    if minutes is None:
        return (BillStage("until make clean", UNLIMITED, ASSUMED),), math.inf
    return (BillStage("idle nodes", minutes, "fleet.idle_minutes"),), minutes / 60


def _image() -> BillStage:
    return BillStage("download of the image", IMAGE, "published job logs: 2.5 to 2.9 min", counted=True)


def _start() -> BillStage:
    return BillStage("start of the ranks", START, ASSUMED, counted=True)
