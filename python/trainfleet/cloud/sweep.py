"""Removes a config's resources, with or without a stack, until AWS itself confirms that they are
gone.

First the stack is deleted, because CloudFormation knows the order. Then other resources with our
tags are removed one by one, such as those that the stack could not delete or had to keep. A
resource that is still in use is retried, because the network interfaces of an instance or a file
system disappear minutes after it. Resources without our tags are never removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..trust.errors import CloudError
from . import clock
from .calls import CODES, DENIED, Calls
from .cloudformation import CloudFormationStack, StackState
from .inventory import OwnedResource, find
from .resource_types import instances, is_gone

AGAIN = 15.0  # seconds between two rounds
PATIENCE = 900.0  # timeout in seconds without any removal
ROUNDS = 3  # tries to delete a stack
LATER = CODES["in use"] | CODES["unanswered"]  # refusals that may be temporary
Say = Callable[[str], None]


@dataclass
class Sweep:
    """The removal of one config's resources.

    `troubles`: why a resource could not be removed yet, by id. `denied`: ids that these credentials
    may not remove.
    """

    calls: Calls
    stack: CloudFormationStack
    say: Say
    troubles: dict[str, str] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)

    def delete_stack(self) -> None:
        """Deletes the stack, and waits until it is gone or can't be deleted. First ends any change
        that another command began.
        """
        self._try(self.stack.name, self._delete)

    def _delete(self) -> None:
        for _ in range(ROUNDS):
            state = self._quiet()
            if state is None or state.gone:
                return
            self.say(f"deleting the stack {self.stack.name}")
            self.stack.delete()
            begun = StackState(state.id, "DELETE_IN_PROGRESS")
            state, failed = self.stack.follow(begun, lambda *_: None)
            if state.gone:
                return
            why = state.reason
            if failed:
                why = self.troubles[failed.physical] = failed.reason
            self.say(f"CloudFormation could not delete all of it: {why}")
            self.pieces(lambda one: not one.holds_data and one.id in self.troubles)

    def _quiet(self) -> StackState | None:
        """Returns the stack after any change that would delay a deletion has ended."""
        state = self.stack.look()
        if state and state.status == "UPDATE_IN_PROGRESS":
            self._try(state.id, self.stack.cancel_update)
        if state and state.busy and not state.status.startswith("CREATE"):
            state, _ = self.stack.follow(state, lambda *_: None)
        return state

    def _try(self, id_: str, act: Callable[[], object]) -> bool:
        """Performs one step and returns whether it succeeded. If the step is denied or must be
        retried, records the reason in `troubles`.
        """
        try:
            act()
        except CloudError as error:
            if error.code in DENIED:
                self.denied.add(id_)
            elif error.code not in LATER and not is_gone(error):
                raise
            if not is_gone(error):
                self.troubles[id_] = error.what if id_ in self.denied else error.why
            return False
        self.troubles.pop(id_, None)
        return True

    def pieces(self, chosen: Callable[[OwnedResource], bool]) -> None:
        """Removes the chosen resources, and repeats until they are gone or no progress is made."""
        asked: set[str] = set()
        before, moved = None, clock.now()
        while left := [
            one
            for one in find(self.calls, self.stack.config)
            if chosen(one) and one.removable and one.id not in self.denied
        ]:
            ids = {one.id for one in left}
            if ids != before:
                before, moved = ids, clock.now()
            if clock.now() - moved > PATIENCE:
                return
            for one in left:
                self._ask(one, asked)
            clock.sleep(AGAIN)

    def _ask(self, one: OwnedResource, asked: set[str]) -> None:
        """Requests the deletion of one resource, unless it was requested or has begun."""
        kind = one.removable
        if kind is None or one.id in asked or _is_going(one):
            return
        if self._try(one.id, lambda: kind.remove(self.calls, one.id, one.row)):
            self.say(f"removed {one.kind} {one.id}")
            asked.add(one.id)

    def end_instances(self) -> None:
        """Terminates all instances first, because deleting the stack takes longer."""
        self._try("instances", self._end_instances)

    def _end_instances(self) -> None:
        ids = [
            row["InstanceId"]
            for row in instances(self.calls, self.stack.config)
            if row["State"]["Name"] != "shutting-down"
        ]
        if ids:
            self.calls("ec2", "TerminateInstances", InstanceIds=ids)


def _is_going(one: OwnedResource) -> bool:
    state = one.row.get("State") or one.row.get("Lifecycle") or ""
    name = state.get("Name", "") if isinstance(state, dict) else str(state)
    return name.lower() in ("shutting-down", "deleting")


def strangers(calls: Calls, found: Iterable[OwnedResource]) -> list[str]:
    """Returns one line per foreign network interface in our VPCs, because such interfaces block the
    deletion.
    """
    said = []
    for vpc in (one for one in found if one.kind == "VPC"):
        filters = [{"Name": "vpc-id", "Values": [vpc.id]}]
        ours = {one.id for one in found}
        for row in calls.pages(
            "ec2", "DescribeNetworkInterfaces", "NetworkInterfaces", Filters=filters
        ):
            name, user = row["NetworkInterfaceId"], row.get("Attachment", {}).get("InstanceId")
            if name not in ours:
                owner = user or row.get("Description") or "nobody's"
                said.append(f"{name} in {vpc.id} is not ours ({owner}) and is not touched")
    return said
