"""What AWS Batch and SageMaker need in the account: a stack, for all that the config does not name as yours."""

from __future__ import annotations

import json
from collections.abc import Callable

from ..cloud import changeset
from ..cloud.engine_fleet import EngineFleet
from ..config import Config
from ..errors import CloudError
from ..plan.request import Artifact
from .bodies import Body
from .instances import Stacked

OUTPUTS = {"${JobRole}": "JobRole", "${ExecutionRole}": "ExecutionRole"}  # in a body, in the place of what the stack has made
JOB_ROLE, EXECUTION_ROLE = OUTPUTS


def filled(cloud: EngineFleet, body: Body) -> Body:
    """A body with what the stack has made in the place of its names.

    Raises:
        CloudError: the stack is not there.
    """
    text = json.dumps(body)
    wanted = [name for name in OUTPUTS if name in text]
    found = cloud.outputs() if wanted else {}
    for name in wanted:
        text = text.replace(name, found[OUTPUTS[name]])
    filled: Body = json.loads(text)
    return filled


class Engine(Stacked):
    """Machines (base.py) of an engine, which makes them for each job itself.

    `needed`: the config leaves something to a stack. `on_ec2`: they are instances of the account. `notes`: more lines of a plan.
    """

    def __init__(
        self, config: Config, engine: str, needed: bool, on_ec2: bool, notes: Callable[[], list[str]] = lambda: []
    ) -> None:
        self.own = EngineFleet(config, engine, on_ec2)
        super().__init__(self.own)
        self.config, self.needed, self.notes = config, needed, notes

    def changes(self) -> tuple[Artifact, ...]:
        return super().changes() if self.needed else ()

    def is_there(self) -> bool:
        """Whether jobs can be given to the engine now, as far as a look at the stack tells; without credentials they can't."""
        try:
            return not self.needed or bool(self.own.outputs())
        except CloudError:
            return False

    def prospect(self) -> tuple[list[str], tuple[Artifact, ...]]:
        """What `make setup` would change, in words and as the very requests; without credentials a plan says so, and no more."""
        if not self.needed:
            return [*self.notes(), "", "account: queue and roles are yours, so setup makes nothing"], ()
        try:
            found = self.foreseen
            return [
                *self.notes(),
                "",
                f"stack {self.cloud.stack.name}",
                *changeset.describe(found.changes, not found.before),
            ], self.changes()
        except CloudError as error:
            return [*self.notes(), "", f"account: not looked at, as {error.what}"], ()

    def apply(self, changes: tuple[Artifact, ...] | None = None) -> int:
        if self.needed:
            self.make()
            print("ready; machines come with a job, and go with it")
        else:
            print("nothing needs setting up: queue and roles are yours")
        print("next: make push, then make train" if self.config.fleet.image == "build" else "next: make train")
        return 0
