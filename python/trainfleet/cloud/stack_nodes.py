"""The machines of a config's stack: creates, counts, replaces and removes them.

This module keeps no state. It reads the nodes from AWS each time, by tag: a node's
logical id in the stack, `Node<slot>`, is on the instance, and a slot with a bad instance is left
out for a new one: all other nodes stay.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import Config
from ..trust.errors import CloudError, NotAsked
from . import checks, clock, discovery, template
from .calls import Calls, region_of
from .cloudformation import Change, CloudFormationStack, Show, StackState, compare
from .instances import NODE, capacity_of
from .inventory import BESIDE, OwnedResource, find, surely
from .resource_types import instances, is_ours
from .resource_types import tags_of as tags
from .stack_errors import explain, is_capacity
from .sweep import Say, Sweep
from .template_inputs import Inputs, stack_name, tags_of

LOGICAL = "aws:cloudformation:logical-id"
UP_IN = 900.0  # seconds until an instance runs and its host key is known
AGAIN = 5.0
# EC2 user guide, "Capacity Blocks for ML": instances are ended from 30 minutes before the end on
BLOCK_ENDS = 1800.0
GOOD = ("pending", "running", "stopping", "stopped")
BROKEN = (
    "CREATE_FAILED",
    "ROLLBACK_COMPLETE",
    "ROLLBACK_FAILED",
    "DELETE_FAILED",
    "REVIEW_IN_PROGRESS",
)


@dataclass(frozen=True)
class StackNode:
    """One of our instances: its slot (None: the head), id, state, zone and addresses."""

    slot: int | None
    id: str
    state: str
    address: str = ""
    public: str = ""
    zone: str = ""


@dataclass(frozen=True)
class Foreseen:
    """A plan's result: the inputs, the stack's present template ({} without a stack) and its next
    one, and the first request of `make`: service, operation, body. `unasked`: why no account was
    asked, so that inputs are placeholders.
    """

    inputs: Inputs
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    requests: list[tuple[str, str, dict[str, Any]]]
    unasked: str = ""

    @property
    def changes(self) -> list[Change]:
        """Lists the changes to each resource."""
        return compare(self.before.get("Resources", {}), self.after["Resources"])


class FleetStack:
    """A config's stack."""

    scheduler = ""

    def __init__(self, config: Config) -> None:
        self.config, self.calls = config, Calls(region_of(config))
        self.stack = CloudFormationStack(self.calls, stack_name(config), config.fleet_name)
        self.troubles: dict[str, str] = {}  # id → why it could not be removed

    # The existing resources

    def everyone(self) -> list[StackNode]:
        """Returns all instances of the stack that are not terminated, the head first and then by
        slot.
        """
        found = []
        for row in instances(self.calls, self.config.fleet_name):
            logical = tags(row.get("Tags")).get(LOGICAL, "")
            slot = re.fullmatch(rf"{NODE}([0-9]{{1,6}})", logical)
            if slot or logical == "Head":
                found.append(
                    StackNode(
                        int(slot[1]) if slot else None,
                        row["InstanceId"],
                        row["State"]["Name"],
                        row.get("PrivateIpAddress", ""),
                        row.get("PublicIpAddress", ""),
                        row["Placement"]["AvailabilityZone"],
                    )
                )
        return sorted(found, key=lambda node: (node.slot is not None, node.slot or 0, node.id))

    def nodes(self) -> list[StackNode]:
        """Returns the running nodes by slot, which is the order of their ranks."""
        return [
            node for node in self.everyone() if node.slot is not None and node.state == "running"
        ]

    def head(self) -> StackNode | None:
        """Returns the machine through which SSH reaches the nodes, if the fleet has one."""
        return next(
            (node for node in self.everyone() if node.slot is None and node.state == "running"),
            None,
        )

    def mount(self) -> tuple[str, str] | None:
        """Returns the file system's DNS and mount names (fleet.fsx); None without one."""
        for row in self.calls.pages("fsx", "DescribeFileSystems", "FileSystems"):
            if (
                is_ours(tags(row.get("Tags")), self.config.fleet_name)
                and row["Lifecycle"] == "AVAILABLE"
            ):
                return row["DNSName"], row["LustreConfiguration"]["MountName"]
        return None

    def ends(self) -> float | None:
        """Returns when AWS begins to end the instances of a capacity block, half an hour before the
        block's end; None without a block.
        """
        named = self.config.fleet.aws.reservation
        if capacity_of(self.config) != "block" or named is None:
            return None
        rows = self.calls("ec2", "DescribeCapacityReservations", CapacityReservationIds=[named])[
            "CapacityReservations"
        ]
        return (
            rows[0]["EndDate"].timestamp() - BLOCK_ENDS if rows and "EndDate" in rows[0] else None
        )

    def render(self, inputs: Inputs) -> str:
        """Renders the stack's wanted template."""
        return template.render(self.config, inputs)

    def check(self, inputs: Inputs) -> None:
        """Checks for everything that would keep AWS from making it. Raises ConfigError or
        CloudError with the obstacles.
        """
        checks.require(self.config, self.calls, inputs)

    # Creation

    def make(self, bad: Collection[str], show: Show, say: Say) -> None:
        """Makes as many nodes as the config asks for, replaces those in `bad` (instance ids), and
        leaves all others unchanged.

        Raises:
            CloudError: the nodes or another resource can't be made; the reason in plain
                words.
        """
        state = self._at_rest(show, say)
        if state is None:
            self._create(show, say)
        else:
            self._change(state, bad, show, say)

    def foresee(self, bad: Collection[str]) -> Foreseen:
        """Predicts the first request of `make`, and the stack's present and next template."""
        try:
            state = self.stack.look()
        except NotAsked as error:
            return self._first(
                self._own(discovery.placeholders(self.config, self.calls.region)), error.what
            )
        if state is None or not state.whole:
            zone = discovery.zones(self.config, self.calls)[0]
            return self._first(self._discover(zone, tuple(range(self.config.fleet.nodes))))
        inputs = self.inputs(state, self._wanted(bad)[0])
        text, before = self.render(inputs), self.stack.template()
        after = json.loads(text)
        requests = (
            [] if after == before else [("cloudformation", "UpdateStack", self.stack.change(text))]
        )
        return Foreseen(inputs, before, after, requests)

    def _first(self, inputs: Inputs, unasked: str = "") -> Foreseen:
        """Predicts the creation of a stack that does not exist yet."""
        text = self.render(inputs)
        creation = self.stack.creation(text, tags_of(self.config, inputs), "one-for-each-command")
        return Foreseen(
            inputs, {}, json.loads(text), [("cloudformation", "CreateStack", creation)], unasked
        )

    def _at_rest(self, show: Show, say: Say) -> StackState | None:
        """Waits until the stack is stable; returns it, or None if it can't be updated."""
        state = self.stack.look()
        if state and state.busy:
            say(
                f"the stack {self.stack.name} is {state.status}: another command began it; "
                "following its progress"
            )
            state, _ = self.stack.follow(state, show)
        if state is None or state.gone:
            return None
        if state.status in BROKEN:
            say(f"the stack {self.stack.name} is {state.status}: deleting it first")
            Sweep(self.calls, self.stack, say).delete_stack()
            state = self.stack.look()
        if state and not state.whole:
            what = f"the stack {self.stack.name} is {state.status}, which can't be continued"
            raise CloudError(
                what, where=self.where, why=state.reason, next="run make clean, then make setup"
            )
        return state

    def _create(self, show: Show, say: Say) -> None:
        zones, slots = (
            discovery.zones(self.config, self.calls),
            tuple(range(self.config.fleet.nodes)),
        )
        for zone, others in zip(zones, range(len(zones) - 1, -1, -1), strict=True):
            inputs = self._discover(zone, slots)
            self.check(inputs)
            say(
                f"making the stack {self.stack.name} in {zone}: {len(slots)} x "
                f"{self.config.fleet.instance_type}"
            )
            state = self.stack.create(
                self.render(inputs), tags_of(self.config, inputs), secrets.token_hex(16)
            )
            state, failed = self.stack.follow(state, show)
            if state.whole:
                return
            error = explain(failed, f"the fleet could not be made in {zone}", self.where)
            if not state.gone:
                self.remove(False, say)
                state = self.stack.look() or StackState(state.id, "DELETE_COMPLETE")
            if not (failed and is_capacity(failed.reason) and others and state.gone):
                raise error
            say(f"{error.why}; trying the next zone")

    def _change(self, state: StackState, bad: Collection[str], show: Show, say: Say) -> None:
        wanted, there, everyone = self._wanted(bad)
        inputs = self.inputs(state, wanted)
        if set(wanted) - set(there):
            self.check(inputs)
        # otherwise the reservation sets the number of nodes
        adds_first = self.config.fleet.aws.capacity in ("on-demand", "spot")
        # a replaced node must give its place in the reservation back
        if not adds_first and set(wanted) - set(there):
            self._update(inputs, tuple(slot for slot in there if slot in wanted), show, say)
        self._update(inputs, wanted, show, say)
        stopped = [node.id for node in everyone if node.state == "stopped" and node.slot in wanted]
        if stopped:
            say(f"starting {', '.join(stopped)}, which had been stopped")
            self.calls("ec2", "StartInstances", InstanceIds=stopped)

    def _wanted(
        self, bad: Collection[str]
    ) -> tuple[tuple[int, ...], tuple[int, ...], list[StackNode]]:
        """Returns the wanted slots, the existing ones, and the instances in them."""
        everyone = [node for node in self.everyone() if node.slot is not None]
        lost = {node.slot for node in everyone if node.id in bad or node.state not in GOOD}
        keep = [node.slot for node in everyone if node.slot is not None and node.slot not in lost]
        there = self._slots()
        return next_slots(there, keep, self.config.fleet.nodes), there, everyone

    def _update(
        self, inputs: Inputs, slots: tuple[int, ...], show: Show, say: Say, kept: bool = False
    ) -> None:
        text = self.render(replace(inputs, slots=slots, kept=kept))
        if not self.stack.update(text):
            say(f"the stack {self.stack.name} is up to date")
            return
        state = self.stack.look()
        assert state
        state, failed = self.stack.follow(state, show)
        if state.status != "UPDATE_COMPLETE":
            raise explain(
                failed,
                "the fleet could not be changed; its nodes are unchanged",
                self.where,
            )

    def inputs(self, state: StackState, slots: tuple[int, ...]) -> Inputs:
        """Returns the inputs of an update: looked-up facts, and those that the stack has fixed."""
        zone = (
            state.parameters.get("Zone")
            or state.outputs.get("In")
            or next(iter(discovery.zones(self.config, self.calls)))
        )
        return template.read_back(self._discover(zone, slots, True), state.parameters)

    def _discover(self, zone: str, slots: tuple[int, ...], is_made: bool = False) -> Inputs:
        return self._own(
            discovery.discover(self.config, self.calls, zone, slots, is_made, self.scheduler)
        )

    def _own(self, inputs: Inputs) -> Inputs:
        alone = not self.scheduler and self.config.fleet.nodes == 1
        return replace(inputs, scheduler=self.scheduler, plain="yes" if alone else "no")

    def _slots(self) -> tuple[int, ...]:
        """Returns the stack's slots, even if their instances are gone."""
        found = (re.fullmatch(rf"{NODE}([0-9]{{1,6}})", name) for name in self.stack.resources())
        return tuple(sorted(int(match[1]) for match in found if match))

    @property
    def where(self) -> str:
        return f"cloudformation in {self.calls.region}"

    def await_nodes(self) -> list[StackNode]:
        """Returns the nodes once as many run as the config asks for. Raises CloudError if they do
        not start.
        """
        deadline = clock.now() + UP_IN
        while len(nodes := self.nodes()) < self.config.fleet.nodes:
            if clock.now() > deadline:
                what = f"{len(nodes)} of {self.config.fleet.nodes} nodes run after {UP_IN:.0f} s"
                rows = ", ".join(
                    f"{node.id} is {node.state}"
                    for node in self.everyone()
                    if node.state != "running"
                )
                raise CloudError(
                    what, where=f"ec2 in {self.calls.region}", why=rows, next="run make setup again"
                )
            clock.sleep(AGAIN)
        return nodes

    # Removal

    def remove(self, purge: bool, say: Say) -> set[str]:
        """Removes everything, except resources that hold data unless `purge` is set. Returns the
        ids of those that stay for their data.
        """
        sweep = Sweep(self.calls, self.stack, say)
        self.troubles = sweep.troubles
        sweep.end_instances()
        stays = (
            []
            if purge
            else [one for one in find(self.calls, self.config.fleet_name) if one.holds_data]
        )
        kept = [one for one in stays if one.kind not in BESIDE]  # what needs the network
        if kept and self._reduce(say):
            stay = {*self.stack.resources().values(), self.stack.name, *(one.id for one in stays)}
        else:
            ids = {one.id for one in stays}
            sweep.pieces(
                lambda one: (
                    one.kind in ("file system", "bucket", "association") and one.id not in ids
                )
            )
            sweep.delete_stack()
            stay = ids
        sweep.pieces(lambda one: one.id not in stay and not (kept and one.kind == "VPC"))
        if not kept:
            sweep.delete_stack()
        return stay

    def _reduce(self, say: Say) -> bool:
        """Reduces the stack to its data and the network that this needs; tells whether it did."""
        try:
            state = self.stack.look()
            if state and state.busy:
                state, _ = self.stack.follow(state, lambda *_: None)
            if not (state and state.whole):
                return False
            say(f"removing all resources of the stack {self.stack.name} that hold no data")
            self._update(self.inputs(state, ()), (), lambda *_: None, say, kept=True)
        except CloudError as error:
            say(str(error))
            return False
        return True

    def left(self) -> list[OwnedResource]:
        """Finds this config's resources, confirmed by two equal listings."""
        return surely(self.calls, self.config.fleet_name)


def next_slots(there: Iterable[int], keep: Iterable[int], count: int) -> tuple[int, ...]:
    """Returns the slots of a fleet of `count` nodes: the first of those to keep, then new ones
    after all existing ones.
    """
    there = sorted(there)
    wanted = sorted(set(keep) & set(there))[:count]
    first = there[-1] + 1 if there else 0
    return (*wanted, *range(first, first + count - len(wanted)))
