"""Removes a config's resources, with or without a stack, until AWS itself confirms that they are
gone.

First the stack is deleted: CloudFormation knows its order. Then the rest is found by tag and
removed one by one: resources that a stack could not delete or had to keep, and others with
our tags. A resource that another still uses is tried again: the interfaces of an instance or a file
system go some minutes after it. A resource without our tags is never removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..trust.errors import CloudError
from . import clock
from .api_errors import CODES, DENIED
from .calls import Calls
from .cloudformation import CloudFormationStack, StackState
from .inventory import OwnedResource, find
from .resource_types import instances, is_gone

AGAIN = 15.0  # seconds between two rounds
PATIENCE = 900.0  # seconds without any removal until a sweep gives up
ROUNDS = 3  # tries to delete a stack
LATER = CODES["in use"] | CODES["unanswered"]  # refusals that may end
Say = Callable[[str], None]


@dataclass
class Sweep:
    """The removal of one config's resources; `troubles`: id → why it could not be removed yet;
    `denied`: ids that these credentials may not remove.
    """

    calls: Calls
    stack: CloudFormationStack
    say: Say
    troubles: dict[str, str] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)

    def delete_stack(self) -> None:
        """Deletes the stack; returns when it is gone or can't be deleted. First ends any change
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
            state, failed = self.stack.follow(
                StackState(state.id, "DELETE_IN_PROGRESS"), lambda *_: None
            )
            if state.gone:
                return
            if failed:
                self.troubles[failed.physical] = failed.reason
            self.say(
                "CloudFormation could not delete all of it: "
                f"{failed.reason if failed else state.reason}"
            )
            self.pieces(lambda one: not one.holds_data and one.id in self.troubles)

    def _quiet(self) -> StackState | None:
        """Waits until no change of the stack is in progress that would delay a deletion; returns
        the stack.
        """
        state = self.stack.look()
        if state and state.status == "UPDATE_IN_PROGRESS":
            self._try(state.id, self.stack.cancel_update)
        if state and state.busy and not state.status.startswith("CREATE"):
            state, _ = self.stack.follow(state, lambda *_: None)
        return state

    def _try(self, id_: str, act: Callable[[], object]) -> bool:
        """Does one step; tells whether it succeeded. A resource that is gone, must wait or is
        denied is reported in `troubles`.
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
        """Removes the chosen resources, each once no other uses it."""
        asked: set[str] = set()
        before, moved = None, clock.now()
        while left := [
            one for one in find(self.calls, self.stack.config) if chosen(one) and self._may_go(one)
        ]:
            ids = {one.id for one in left}
            if ids != before:
                before, moved = ids, clock.now()
            if clock.now() - moved > PATIENCE:
                return
            for one in left:
                self._ask(one, asked)
            clock.sleep(AGAIN)

    def _may_go(self, one: OwnedResource) -> bool:
        return one.removable is not None and one.id not in self.denied

    def _ask(self, one: OwnedResource, asked: set[str]) -> None:
        """Asks AWS to delete one resource, only once if the deletion takes long."""
        kind = one.removable
        if kind is None or one.id in asked or _is_going(one):
            return
        if self._try(one.id, lambda: kind.remove(self.calls, one.id, one.row)):
            self.say(f"removed {one.kind} {one.id}")
            asked.add(one.id)

    def end_instances(self) -> None:
        """Terminates all instances at once: their cost ends now, not when the stack reaches
        them.
        """
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
    """Yields a line for each foreign resource in our networks, which keeps those from being
    deleted.
    """
    said = []
    for vpc in (one for one in found if one.kind == "VPC"):
        filters = [{"Name": "vpc-id", "Values": [vpc.id]}]
        ours = {one.id for one in found}
        for row in calls.pages(
            "ec2", "DescribeNetworkInterfaces", "NetworkInterfaces", Filters=filters
        ):
            if row["NetworkInterfaceId"] not in ours:
                owner = (
                    row.get("Attachment", {}).get("InstanceId")
                    or row.get("Description")
                    or "nobody's"
                )
                said.append(
                    f"{row['NetworkInterfaceId']} in {vpc.id} is not ours ({owner}) and is "
                    "not touched"
                )
    return said
