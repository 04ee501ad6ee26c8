"""What jobs of AWS Batch run on: a compute environment and a queue in a stack of their own, or a queue of yours."""

from __future__ import annotations

import json

from ..cloud.calls import Calls
from ..cloud.inputs import slug, stack_name
from ..config import Config
from ..errors import BackendError
from ..plan.request import Artifact
from .bodies import Body

JOB_ROLE, EXECUTION_ROLE = "${JobRole}", "${ExecutionRole}"  # what the stack has made, by the names of its outputs
OUTPUTS = {JOB_ROLE: "JobRole", EXECUTION_ROLE: "ExecutionRole"}


def name_of(config: Config) -> str:
    """What the queue and the compute environment of a config are called."""
    return f"trainfleet-{slug(config.name, 60)}"


def filled(calls: Calls, config: Config, body: Body) -> Body:
    """A body with what the stack has made in the place of its names.

    Raises:
        BackendError: the stack is not there, or lacks it.
    """
    text = json.dumps(body)
    wanted = [name for name in OUTPUTS if name in text]
    if not wanted:
        return body
    found = outputs(calls, config)
    for name in wanted:
        text = text.replace(name, found[OUTPUTS[name]])
    filled: Body = json.loads(text)
    return filled


def outputs(calls: Calls, config: Config) -> dict[str, str]:
    """The outputs of the config's stack. BackendError when it is not there."""
    stacks = calls("cloudformation", "DescribeStacks", StackName=stack_name(config)).get("Stacks", ())
    if not stacks:
        raise BackendError("no machines are set up", where=config.name, next="make setup")
    return {row["OutputKey"]: row["OutputValue"] for row in stacks[0].get("Outputs", ())}


class Stack:
    """The machines of a config on AWS Batch."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def changes(self) -> tuple[Artifact, ...]:
        return ()

    def apply(self, changes: tuple[Artifact, ...] | None = None) -> int:
        return 0

    def left(self) -> list[str]:
        return []

    def remove(self, purge: bool) -> None: ...
