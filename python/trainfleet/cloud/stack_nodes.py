"""Creates, counts, replaces and removes the machines in a config's stack.

This module keeps no state: it reads the nodes from AWS each time, by tag. An instance's tag names
its logical ID in the stack, `Node<slot>`. To replace a bad instance, an update removes its slot and
adds a new one; all other nodes stay.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ..config import Config
from ..trust.errors import CloudError, NotAsked
from . import checks, clock, discovery, template
from .calls import Calls, Json, Row, region_of
from .cloudformation import (
    LACKS_CAPACITY,
    Change,
    CloudFormationStack,
    Show,
    StackState,
    compare,
    explain,
    is_capacity,
)
from .inventory import BESIDE, OwnedResource, Say, Sweep, find, surely
from .resource_types import has_our_tags, instances
from .resource_types import tags_of as tags
from .template import BUILDER, BUILDER_TYPE, NODE, builds_first, capacity_of
from .template_inputs import Inputs, stack_name, tags_of

Slots = tuple[int, ...]
LOGICAL = "aws:cloudformation:logical-id"
UP_IN = 900.0  # timeout in seconds for an instance to start and provide its host key
AGAIN = 5.0  # seconds between polls
# Seconds before a capacity block's end at which EC2 starts terminating its instances. Source: EC2
# user guide, "Capacity Blocks for ML".
BLOCK_ENDS = 1800.0
BUILDER_SLOT = -1
GOOD = ("pending", "running", "stopping", "stopped")
OTHERS = {"Head": None, BUILDER: BUILDER_SLOT}  # instances that are not nodes
BROKEN = (
    "CREATE_FAILED",
    "ROLLBACK_COMPLETE",
    "ROLLBACK_FAILED",
    "DELETE_FAILED",
    "REVIEW_IN_PROGRESS",
)


@dataclass(frozen=True)
class StackNode:
    """One instance in the stack. `slot`: None for the head, BUILDER_SLOT for the machine that
    builds the Python environment.
    """

    slot: int | None
    id: str
    state: str
    address: str = ""
    public: str = ""
    zone: str = ""


@dataclass(frozen=True)
class Foreseen:
    """The predicted result of `make`: inputs, templates, and the first requests.

    `before`: the stack's current template, or {} without a stack. `after`: its next template.
    `requests`: service, operation and body. `unasked`: why the account was not queried, in which
    case the inputs are placeholders.
    """

    inputs: Inputs
    before: Row
    after: Row
    requests: list[tuple[str, str, Json]]
    unasked: str = ""

    @property
    def changes(self) -> list[Change]:
        """Returns the change to each resource."""
        return compare(self.before.get("Resources", {}), self.after["Resources"])


class FleetStack:
    """A config's stack."""

    scheduler = ""

    def __init__(self, config: Config) -> None:
        self.config, self.calls = config, Calls(region_of(config))
        self.stack = CloudFormationStack(self.calls, stack_name(config), config.fleet_name)
        self.troubles: dict[str, str] = {}  # resource ID → why it could not be removed

    # Existing resources

    def everyone(self) -> list[StackNode]:
        """Returns the stack's instances that are not terminated: the head first, then by slot."""
        found = []
        for row in instances(self.calls, self.config.fleet_name):
            logical = tags(row.get("Tags")).get(LOGICAL, "")
            slot = re.fullmatch(rf"{NODE}([0-9]{{1,6}})", logical)
            if slot or logical in OTHERS:
                node = StackNode(
                    int(slot[1]) if slot else OTHERS[logical],
                    row["InstanceId"],
                    row["State"]["Name"],
                    row.get("PrivateIpAddress", ""),
                    row.get("PublicIpAddress", ""),
                    row["Placement"]["AvailabilityZone"],
                )
                found.append(node)
        return sorted(found, key=lambda node: (node.slot is not None, node.slot or 0, node.id))

    def _running(self) -> list[StackNode]:
        return [node for node in self.everyone() if node.state == "running"]

    def nodes(self) -> list[StackNode]:
        """Returns the running nodes by slot, which is also the rank order."""
        return [node for node in self._running() if node.slot not in OTHERS.values()]

    def builder(self) -> list[StackNode]:
        """Returns the running machine that builds the Python environment, or []."""
        return [node for node in self._running() if node.slot == BUILDER_SLOT]

    def begun(self) -> bool:
        """Returns whether the stack has a machine that builds the Python environment, and no nodes
        yet.
        """
        alive = builds_first(self.config) and self.builder()
        return bool(alive) and BUILDER in self.stack.resources()

    def head(self) -> StackNode | None:
        """Returns the machine through which SSH reaches the nodes, if the fleet has one."""
        return next((node for node in self._running() if node.slot is None), None)

    def mount(self) -> tuple[str, str] | None:
        """Returns the file system's DNS and mount names (fleet.fsx), or None without a file
        system.
        """
        for row in self.calls.pages("fsx", "DescribeFileSystems", "FileSystems"):
            is_usable = row["Lifecycle"] == "AVAILABLE"
            if is_usable and has_our_tags(row, self.config.fleet_name):
                return row["DNSName"], row["LustreConfiguration"]["MountName"]
        return None

    def ends(self) -> float | None:
        """Returns when EC2 starts terminating the capacity block's instances, or None without a
        block.
        """
        named = self.config.fleet.aws.reservation
        if capacity_of(self.config) != "block" or named is None:
            return None
        answer = self.calls("ec2", "DescribeCapacityReservations", CapacityReservationIds=[named])
        rows = answer["CapacityReservations"]
        return (
            rows[0]["EndDate"].timestamp() - BLOCK_ENDS if rows and "EndDate" in rows[0] else None
        )

    def render(self, inputs: Inputs) -> str:
        """Renders the template for the stack."""
        return template.render(self.config, inputs)

    def check(self, inputs: Inputs) -> None:
        """Raises a ConfigError or CloudError listing all obstacles to creating the stack."""
        checks.require(self.config, self.calls, inputs)

    # Creation

    def make(self, bad: Collection[str], show: Show, say: Say) -> None:
        """Creates the configured number of nodes, and replaces those in `bad` (instance IDs).

        Other nodes stay unchanged. Raises CloudError if a resource can't be created.
        """
        state = self._at_rest(show, say)
        if state is None:
            self._create(discovery.zones(self.config, self.calls), show, say)
        else:
            self._change(state, bad, show, say)

    def foresee(self, bad: Collection[str]) -> Foreseen:
        """Predicts the first requests of `make`, with the stack's current and next templates."""
        try:
            state = self.stack.look()
        except NotAsked as error:
            inputs = discovery.placeholders(self.config, self.calls.region)
            return self._first(self._own(inputs), error.what)
        if state is None or not state.whole:
            zone = discovery.zones(self.config, self.calls)[0]
            return self._first(self._discover(zone, tuple(range(self.config.fleet.nodes))))
        inputs = self.inputs(state, self._wanted(bad)[0])
        text, before = self.render(inputs), self.stack.template()
        after = json.loads(text)
        update = ("cloudformation", "UpdateStack", self.stack.change(text))
        return Foreseen(inputs, before, after, [] if after == before else [update])

    def _first(self, inputs: Inputs, unasked: str = "") -> Foreseen:
        """Predicts the creation of a stack that does not exist yet."""
        text, begins = self.render(inputs), self.render(self._beginning(inputs))
        body = self.stack.creation(begins, tags_of(self.config, inputs), "one-for-each-command")
        requests = [("cloudformation", "CreateStack", body)]
        if begins != text:
            requests.append(("cloudformation", "UpdateStack", self.stack.change(text)))
        return Foreseen(inputs, {}, json.loads(text), requests, unasked)

    def _beginning(self, inputs: Inputs) -> Inputs:
        """Returns the inputs for creating the stack. If a cheap machine first builds the Python
        environment, a later update adds the nodes.
        """
        first = not self.scheduler and builds_first(self.config)
        return replace(inputs, slots=(), builds=True) if first else inputs

    def _at_rest(self, show: Show, say: Say) -> StackState | None:
        """Waits until no change is in progress, and deletes a stack whose creation failed. Returns
        the stack, or None if it must be created.
        """
        state = self.stack.look()
        if state and state.busy:
            other = "another command began it; following its progress"
            say(f"the stack {self.stack.name} is {state.status}: {other}")
            state, _ = self.stack.follow(state, show)
        if state is None or state.gone:
            return None
        if state.status in BROKEN:
            say(f"the stack {self.stack.name} is {state.status}: deleting it first")
            Sweep(self.calls, self.stack, say).delete_stack()
            state = self.stack.look()
        if state and not state.whole:
            what = f"the stack {self.stack.name} is {state.status}, which can't be continued"
            then = "run make clean, then make setup"
            raise CloudError(what, where=self.where, why=state.reason, next=then)
        return state

    def _create(self, zones: Sequence[str], show: Show, say: Say) -> None:
        slots = tuple(range(self.config.fleet.nodes))
        fleet = f"{len(slots)} x {self.config.fleet.instance_type}"
        for zone in zones:
            inputs = self._discover(zone, slots)
            self.check(inputs)
            begins = self._beginning(inputs)
            first = f", after the Python environment on 1 x {BUILDER_TYPE}" * begins.builds
            say(f"making the stack {self.stack.name} in {zone}: {fleet}{first}")
            text, token = self.render(begins), secrets.token_hex(16)
            state = self.stack.create(text, tags_of(self.config, inputs), token)
            state, failed = self.stack.follow(state, show)
            if state.whole:
                return
            error = explain(failed, f"the fleet could not be made in {zone}", self.where)
            if not state.gone:
                self.remove(False, say)
                state = self.stack.look() or StackState(state.id, "DELETE_COMPLETE")
            lacks_capacity = failed and is_capacity(failed.reason)
            if not (lacks_capacity and state.gone) or zone == zones[-1]:
                raise error
            say(f"{error.why}; trying the next zone")

    def _change(self, state: StackState, bad: Collection[str], show: Show, say: Say) -> None:
        wanted, there, everyone = self._wanted(bad)
        inputs = self.inputs(state, wanted)
        if set(wanted) - set(there):
            self.check(inputs)
        # A reservation has no room for a new node until the replaced one is gone.
        adds_first = self.config.fleet.aws.capacity in ("on-demand", "spot")
        if not adds_first and set(wanted) - set(there):
            self._update(inputs, tuple(slot for slot in there if slot in wanted), show, say)
        if not there and any(node.slot == BUILDER_SLOT for node in everyone):
            self._fill(inputs, wanted, show, say)
        else:
            self._update(inputs, wanted, show, say)
        stopped = [node.id for node in everyone if node.state == "stopped" and node.slot in wanted]
        if stopped:
            say(f"starting {', '.join(stopped)}, which had been stopped")
            self.calls("ec2", "StartInstances", InstanceIds=stopped)

    def _fill(self, inputs: Inputs, slots: Slots, show: Show, say: Say) -> None:
        """Creates a stack's first nodes. If the zone lacks capacity, starts over in the next
        zone.
        """
        try:
            self._update(inputs, slots, show, say)
        except CloudError as error:
            zones = discovery.zones(self.config, self.calls)
            rest = zones[zones.index(inputs.zone) + 1 :] if inputs.zone in zones else []
            if error.code != LACKS_CAPACITY or not rest:
                raise
            say(f"{error.why}; trying the next zone")
            self._leave(say)
            self._create(rest, show, say)

    def _leave(self, say: Say) -> None:
        """Removes a stack that never had nodes. Its file system is also removed, because it
        contains only the Python environment.
        """
        made, kinds = set(self.stack.resources().values()), ("file system", "association")
        sweep = Sweep(self.calls, self.stack, say)
        sweep.pieces(lambda one: one.kind in kinds and one.id in made)
        self.remove(False, say)

    def _wanted(self, bad: Collection[str]) -> tuple[Slots, Slots, list[StackNode]]:
        """Returns the desired slots, the existing slots, and the instances in them."""
        everyone = [node for node in self.everyone() if node.slot is not None]
        lost = {node.slot for node in everyone if node.id in bad or node.state not in GOOD}
        keep = [node.slot for node in everyone if node.slot is not None and node.slot not in lost]
        there = self._slots()
        return next_slots(there, keep, self.config.fleet.nodes), there, everyone

    def _update(
        self, inputs: Inputs, slots: Slots, show: Show, say: Say, kept: bool = False
    ) -> None:
        text = self.render(replace(inputs, slots=slots, kept=kept))
        if not self.stack.update(text):
            say(f"the stack {self.stack.name} is up to date")
            return
        state = self.stack.look()
        assert state
        state, failed = self.stack.follow(state, show)
        if state.status != "UPDATE_COMPLETE":
            what = "the fleet could not be changed; its nodes are unchanged"
            raise explain(failed, what, self.where)

    def inputs(self, state: StackState, slots: Slots) -> Inputs:
        """Returns the inputs for an update: account details, and the existing stack's
        parameters.
        """
        zone = (
            state.parameters.get("Zone")
            or state.outputs.get("In")
            or next(iter(discovery.zones(self.config, self.calls)))
        )
        return template.read_back(self._discover(zone, slots, True), state.parameters)

    def _discover(self, zone: str, slots: Slots, is_made: bool = False) -> Inputs:
        found = discovery.discover(self.config, self.calls, zone, slots, is_made, self.scheduler)
        return self._own(found)

    def _own(self, inputs: Inputs) -> Inputs:
        alone = not self.scheduler and self.config.fleet.nodes == 1
        return replace(inputs, scheduler=self.scheduler, plain="yes" if alone else "no")

    def _slots(self) -> Slots:
        """Returns the stack's slots, including those without an instance."""
        found = (re.fullmatch(rf"{NODE}([0-9]{{1,6}})", name) for name in self.stack.resources())
        return tuple(sorted(int(match[1]) for match in found if match))

    @property
    def where(self) -> str:
        return f"cloudformation in {self.calls.region}"

    def await_nodes(self, builder: bool = False) -> list[StackNode]:
        """Waits until all of the config's nodes are running or, with `builder`, the machine that
        builds the Python environment. Raises CloudError on timeout.
        """
        deadline = clock.now() + UP_IN
        count, find = (1, self.builder) if builder else (self.config.fleet.nodes, self.nodes)
        while len(nodes := find()) < count:
            if clock.now() > deadline:
                others = [node for node in self.everyone() if node.state != "running"]
                what = f"{len(nodes)} of {count} nodes are running after {UP_IN:.0f} s"
                why = ", ".join(f"{node.id} is {node.state}" for node in others)
                where = f"ec2 in {self.calls.region}"
                raise CloudError(what, where=where, why=why, next="run make setup again")
            clock.sleep(AGAIN)
        return nodes

    # Removal

    def remove(self, purge: bool, say: Say) -> set[str]:
        """Removes all resources. Those that hold data are removed only with `purge`. Returns the
        IDs of the remaining resources.
        """
        sweep = Sweep(self.calls, self.stack, say)
        self.troubles = sweep.troubles
        sweep.end_instances()
        owned = [] if purge else find(self.calls, self.config.fleet_name)
        stays = [one for one in owned if one.holds_data]
        kept = [one for one in stays if one.kind not in BESIDE]  # resources that need the network
        if kept and self._reduce(say):
            stay = {*self.stack.resources().values(), self.stack.name, *(one.id for one in stays)}
        else:
            ids = {one.id for one in stays}
            stores = ("file system", "bucket", "association")
            sweep.pieces(lambda one: one.kind in stores and one.id not in ids)
            sweep.delete_stack()
            stay = ids
        sweep.pieces(lambda one: one.id not in stay and not (kept and one.kind == "VPC"))
        if not kept:
            sweep.delete_stack()
        return stay

    def _reduce(self, say: Say) -> bool:
        """Reduces the stack to the resources that hold data, and their network. Returns whether it
        succeeded.
        """
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
        """Returns this config's remaining resources, once two listings agree."""
        return surely(self.calls, self.config.fleet_name)


def next_slots(there: Iterable[int], keep: Iterable[int], count: int) -> Slots:
    """Returns the slots for a fleet of `count` nodes: up to `count` of the slots to keep, then new
    ones above all existing slots.
    """
    there = sorted(there)
    wanted = sorted(set(keep) & set(there))[:count]
    first = there[-1] + 1 if there else 0
    return (*wanted, *range(first, first + count - len(wanted)))
