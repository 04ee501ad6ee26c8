"""What jobs of SageMaker need: a role, of a stack or of yours. SageMaker makes the machines itself, and takes them down."""

from __future__ import annotations

from ..cloud.calls import Calls
from ..config import Config
from ..data.manifest import ITEM_BYTES, find
from ..plan.request import Artifact
from . import machines_of_batch
from .bodies import Body

ROLE = machines_of_batch.JOB_ROLE


def filled(calls: Calls, config: Config, body: Body) -> Body:
    """As machines_of_batch.filled."""
    return machines_of_batch.filled(calls, config, body)


def size_of(config: Config) -> int | None:
    """Bytes of the config's dataset in its store; None where it is not there."""
    manifest = find(config.data)
    return None if manifest is None else manifest.tokens * ITEM_BYTES[manifest.dtype]


class Stack:
    """The role of a config on SageMaker."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def changes(self) -> tuple[Artifact, ...]:
        return ()

    def apply(self, changes: tuple[Artifact, ...] | None = None) -> int:
        return 0

    def left(self) -> list[str]:
        return []

    def remove(self, purge: bool) -> None: ...
