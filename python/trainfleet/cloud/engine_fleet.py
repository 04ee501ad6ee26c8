"""The stack of AWS Batch, SageMaker or ParallelCluster: as a fleet's, but without nodes, which the
engine makes.
"""

from __future__ import annotations

from collections.abc import Collection

from ..config import Config
from ..trust.errors import CloudError
from . import engine_template
from .stack_nodes import FleetStack, StackNode
from .template_inputs import Inputs


class EngineFleet(FleetStack):
    """The stack that `engine`, batch, sagemaker or parallelcluster, needs."""

    def __init__(self, config: Config, engine: str) -> None:
        super().__init__(config)
        self.engine = engine

    def render(self, inputs: Inputs) -> str:
        return engine_template.render(self.config, inputs, self.engine)

    def _wanted(
        self, bad: Collection[str]
    ) -> tuple[tuple[int, ...], tuple[int, ...], list[StackNode]]:
        return (), (), []

    def outputs(self) -> dict[str, str]:
        """Returns the stack's outputs by name; CloudError without a stack."""
        state = self.stack.look()
        if state is None or not state.whole:
            why = (
                f"the stack {self.stack.name} is {state.status}"
                if state
                else f"there is no stack {self.stack.name}"
            )
            raise CloudError(
                "nothing is set up for this config", where=self.where, why=why, next="make setup"
            )
        return dict(state.outputs)
