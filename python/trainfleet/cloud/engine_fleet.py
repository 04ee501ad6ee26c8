"""The stack of AWS Batch, SageMaker or ParallelCluster: as a fleet's, but without nodes, which the engine makes."""

from __future__ import annotations

from collections.abc import Collection

from ..config import Config
from ..errors import CloudError
from . import engine_template
from .inputs import Inputs
from .stack_nodes import Fleet, Node


class EngineFleet(Fleet):
    """What `engine`, batch, sagemaker or parallelcluster, needs. `on_ec2`: its nodes are instances of the account."""

    def __init__(self, config: Config, engine: str, on_ec2: bool) -> None:
        super().__init__(config)
        self.engine, self.on_ec2 = engine, on_ec2

    def render(self, inputs: Inputs) -> str:
        return engine_template.render(self.config, inputs, self.engine)

    def check(self, inputs: Inputs) -> None:
        """Machines of the engine's own count against other quotas, which are looked at when a job is submitted."""
        if self.on_ec2:
            super().check(inputs)

    def _wanted(self, bad: Collection[str]) -> tuple[tuple[int, ...], tuple[int, ...], list[Node]]:
        return (), (), []

    def outputs(self) -> dict[str, str]:
        """What the stack has made, by name; CloudError where it is not there."""
        state = self.stack.look()
        if state is None or not state.whole:
            why = f"the stack {self.stack.name} is {state.status}" if state else f"there is no stack {self.stack.name}"
            raise CloudError("nothing is set up for this config", where=self.where, why=why, next="make setup")
        return dict(state.outputs)
