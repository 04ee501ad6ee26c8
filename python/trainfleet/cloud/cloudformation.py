"""Creates, updates and deletes a CloudFormation stack. Follows its events, explains why creation
failed, and compares templates to predict which resources an update creates, removes, changes or
replaces.

CloudFormation continues even if the calling process dies. So each step first reads the stack and
joins any change that another command started. No state is kept between commands.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..config.tables import read_table
from ..trust.errors import CloudError
from . import clock
from .calls import CODES, Calls, Json, Row
from .template_inputs import TEMPLATE_TYPES, pairs

Resources = Mapping[str, Row]
WIDTH = 100  # line width, in columns
SIGNS = {"made": "+", "removed": "-", "changed": "~", "replaced": "±"}


@dataclass(frozen=True)
class Change:
    """A change to a resource: logical ID, type, and kind of change (a key of SIGNS)."""

    name: str
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{SIGNS[self.what]} {self.name}  {short(self.kind)}"


def short(kind: str) -> str:
    """Returns a resource type without CloudFormation's punctuation, such as `EC2 Instance`."""
    return kind.removeprefix("AWS::").replace("::", " ")


def compare(before: Resources, after: Resources) -> list[Change]:
    """Returns every change, in template order. An instance is replaced if its launch template
    changes.
    """
    changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
    stale = {name for name in changed if after[name]["Type"] == "AWS::EC2::LaunchTemplate"}
    return [
        change
        for name in {**after, **before}
        if (change := _of(name, before, after, changed, stale))
    ]


def _of(
    name: str, before: Resources, after: Resources, changed: set[str], stale: set[str]
) -> Change | None:
    kind = str((after.get(name) or before[name])["Type"])
    if name not in before:
        return Change(name, kind, "made")
    if name not in after:
        return Change(name, kind, "removed")
    quoted = str(after[name]).replace("'", '"')
    if kind == "AWS::EC2::Instance" and any(f'"{template}"' in quoted for template in stale):
        return Change(name, kind, "replaced")
    if name not in changed:
        return None
    old, new = before[name].get("Properties", {}), after[name].get("Properties", {})
    keys = TEMPLATE_TYPES.get(kind, {}).get("replaced_by", ())
    replaces = any(old.get(key) != new.get(key) for key in keys)
    return Change(name, kind, "replaced" if replaces else "changed")


def describe(changes: list[Change], is_new: bool) -> Iterator[str]:
    """Yields the changes for `make plan`: counts by type for a new stack, otherwise each
    resource.
    """
    if is_new:
        counts = Counter(short(change.kind) for change in changes)
        parts = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        line = f"a new stack of {len(changes)} resources: {parts}"
        yield textwrap.fill(
            line,
            WIDTH,
            break_on_hyphens=False,
            initial_indent="  + ",
            subsequent_indent="    ",
        )
        return
    if not changes:
        yield "  nothing; the stack is up to date"
    yield from (f"  {change}" for change in changes)
    replaced = [change for change in changes if change.what == "replaced"]
    if nodes := sum(change.kind == "AWS::EC2::Instance" for change in replaced):
        yield f"  warning: {nodes} nodes will be replaced, because their launch template changed"


POLL = 5.0  # seconds between polls of a stack that is changing
# Seconds without an event after which `follow` gives up. CloudFormation itself times out earlier.
PATIENCE = 3 * 3600.0
MISSES = 20  # consecutive unanswered or throttled polls after which `follow` gives up
CAPABILITIES = ["CAPABILITY_NAMED_IAM"]
PROJECT, CONFIG, CREATED = (f"trainfleet:{name}" for name in ("project", "config", "created"))
OURS = "trainfleet"  # value of the PROJECT tag
# prints a line: a resource's logical ID, its state, and a message
Show = Callable[[str, str, str], None]


@dataclass(frozen=True)
class StackState:
    """A stack's state, from DescribeStacks."""

    id: str
    status: str
    reason: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Returns whether CloudFormation is changing the stack."""
        return self.status.endswith("_IN_PROGRESS") and self.status != "REVIEW_IN_PROGRESS"

    @property
    def whole(self) -> bool:
        """Returns whether the stack can be updated, because its last change or rollback
        succeeded.
        """
        return self.status in ("CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE")

    @property
    def gone(self) -> bool:
        return self.status == "DELETE_COMPLETE"


@dataclass(frozen=True)
class StackEvent:
    """An event for one resource, or for the stack itself (`own`)."""

    id: str
    logical: str
    physical: str
    type: str
    status: str
    reason: str
    own: bool

    @property
    def failed(self) -> bool:
        """Returns whether this resource itself failed, rather than being cancelled because another
        one did.
        """
        if self.own or not self.status.endswith("_FAILED"):
            return False
        return not re.search("cancelled|not been attempted", self.reason)


@dataclass
class CloudFormationStack:
    """A config's stack. `followed`: ID of the last event read."""

    calls: Calls
    name: str
    config: str
    followed: str = ""

    def look(self, id_: str = "") -> StackState | None:
        """Returns the stack's current state, or None if it does not exist. `id_` also finds a
        deleted stack.

        Raises:
            CloudError: a stack with that name exists, but this config did not create it.
        """
        name = id_ or self.name
        try:
            rows = self.calls("cloudformation", "DescribeStacks", StackName=name)["Stacks"]
        except CloudError as error:
            if error.code == "ValidationError" and "does not exist" in error.why:
                return None
            raise
        state = _state(rows[0])
        if state.tags.get(PROJECT) != OURS or state.tags.get(CONFIG) != self.config:
            what = f"the stack {self.name} exists, but this config did not make it"
            then = "set another name in config.yaml, or delete that stack yourself"
            where = f"cloudformation in {self.calls.region}"
            raise CloudError(what, where=where, next=then, code="Foreign")
        return state

    def create(self, template: str, tags: Mapping[str, str], token: str) -> StackState:
        """Starts creating the stack. A second request with the same token has no effect. If
        creation fails, CloudFormation deletes the stack.
        """
        answer = self.calls("cloudformation", "CreateStack", **self.creation(template, tags, token))
        # CloudFormation may not list the new stack yet.
        return self.look(answer["StackId"]) or StackState(answer["StackId"], "CREATE_IN_PROGRESS")

    def creation(self, template: str, tags: Mapping[str, str], token: str) -> Json:
        """Returns the CreateStack request."""
        more = {"OnFailure": "DELETE", "ClientRequestToken": token, "Tags": pairs(tags)}
        return self.change(template) | more

    def change(self, template: str) -> Json:
        """Returns the UpdateStack request. Parameters default to the template's values."""
        return {"StackName": self.name, "TemplateBody": template, "Capabilities": CAPABILITIES}

    def update(self, template: str) -> bool:
        """Starts an update that keeps the tags. Returns False if the template is unchanged."""
        self._catch_up()
        try:
            self.calls("cloudformation", "UpdateStack", **self.change(template))
        except CloudError as error:
            if "No updates are to be performed" in error.why:
                return False
            raise
        return True

    def delete(self) -> None:
        """Starts deleting the stack. Has no effect if the stack is gone or is being deleted."""
        self._catch_up()
        self.calls("cloudformation", "DeleteStack", StackName=self.name)

    def cancel_update(self) -> None:
        """Cancels and rolls back an update in progress."""
        self.calls("cloudformation", "CancelUpdateStack", StackName=self.name)

    def resources(self) -> dict[str, str]:
        """Returns the stack's current resources as logical ID → physical ID."""
        rows = self.calls.pages(
            "cloudformation", "ListStackResources", "StackResourceSummaries", StackName=self.name
        )
        return {
            row["LogicalResourceId"]: row["PhysicalResourceId"]
            for row in rows
            if row.get("PhysicalResourceId") and row["ResourceStatus"] != "DELETE_COMPLETE"
        }

    def template(self) -> Row:
        """Returns the stack's current template."""
        body = self.calls("cloudformation", "GetTemplate", StackName=self.name)["TemplateBody"]
        found = json.loads(body) if isinstance(body, str) else body
        return found if isinstance(found, dict) else {}

    def follow(self, state: StackState, show: Show) -> tuple[StackState, StackEvent | None]:
        """Shows events until no change is in progress. Returns the stack's state and the first
        failure.

        Raises:
            CloudError: AWS stops responding, or CloudFormation makes no progress.
        """
        first, misses, heard = None, 0, clock.now()
        while True:
            try:
                for event in self._news(state.id):
                    heard = clock.now()
                    first = first or (event if event.failed else None)
                    _tell(event, show)
                state = self.look(state.id) or StackState(state.id, "DELETE_COMPLETE")
                misses = 0
            except CloudError as error:
                misses += 1
                if error.code not in CODES["unanswered"] or misses > MISSES:
                    raise
            if not state.busy and not misses:
                return state, first
            if clock.now() - heard > PATIENCE:
                what = f"the stack {self.name} has had no event for hours; it is {state.status}"
                where, then = (
                    f"cloudformation in {self.calls.region}",
                    "run make setup again, or make clean",
                )
                raise CloudError(what, where=where, next=then)
            clock.sleep(POLL)

    def _news(self, id_: str) -> Iterator[StackEvent]:
        """Yields the events since the last poll, oldest first."""
        news = []
        for row in self.calls.pages(
            "cloudformation", "DescribeStackEvents", "StackEvents", StackName=id_
        ):
            if row["EventId"] == self.followed:
                break
            news.append(_event(row))
        if news:
            self.followed = news[0].id
        yield from reversed(news)

    def _catch_up(self) -> None:
        """Skips existing events, so that `follow` shows only new ones."""
        if self.look():
            list(self._news(self.name))


def _state(row: Row) -> StackState:
    return StackState(
        row["StackId"],
        row["StackStatus"],
        row.get("StackStatusReason", ""),
        {tag["Key"]: tag["Value"] for tag in row.get("Tags", ())},
        {out["OutputKey"]: out["OutputValue"] for out in row.get("Outputs", ())},
        {one["ParameterKey"]: one["ParameterValue"] for one in row.get("Parameters", ())},
    )


def _event(row: Row) -> StackEvent:
    is_stack = row["ResourceType"] == "AWS::CloudFormation::Stack"
    return StackEvent(
        row["EventId"],
        row["LogicalResourceId"],
        row.get("PhysicalResourceId", ""),
        row["ResourceType"],
        row["ResourceStatus"],
        row.get("ResourceStatusReason", ""),
        is_stack and row.get("PhysicalResourceId") == row["StackId"],
    )


DONE = {
    "CREATE_COMPLETE": "made",
    "UPDATE_COMPLETE": "changed",
    "DELETE_COMPLETE": "deleted",
    "DELETE_SKIPPED": "kept",
}


def _tell(event: StackEvent, show: Show) -> None:
    """Shows a resource's event: its type while in progress, its ID when done, or the failure."""
    if event.own:
        return
    kind = short(event.type)
    if event.failed:
        show(event.logical, "FAILED", f"{kind}: {event.reason}")
    elif event.status.endswith("_FAILED"):
        show(event.logical, "cancelled", kind)
    elif event.status.endswith("_IN_PROGRESS"):
        show(event.logical, "deleting" if event.status.startswith("DELETE") else "working", kind)
    else:
        show(event.logical, DONE.get(event.status, "done"), f"{kind} {event.physical}")


# the text that CloudFormation wraps around a service's message
FRAME = re.compile(r'Resource handler returned message: "(.*?)"? \(RequestToken', re.DOTALL)
SERVICE = re.compile(r"\s*\(Service: .*?(\)|$)", re.DOTALL)
CAPACITY = re.compile(
    r"do(es)? not have (sufficient|enough).*capacity|Insufficient(Instance|Host)?Capacity|"
    r"insufficient capacity|no Spot capacity|capacity-not-available|ReservationCapacityExceeded|"
    r"reservation.*(exceeded|not.*available capacity)",
    re.IGNORECASE | re.DOTALL,
)
ELSEWHERE = re.compile(
    r"not supported in your requested Availability Zone|is not supported in the.*zone|Unsupported",
    re.IGNORECASE,
)
LACKS_CAPACITY = "InsufficientCapacity"  # error code if a zone lacks capacity
MEANINGS = read_table(Path(__file__).with_name("stack_errors.yaml"))


def words_of(reason: str) -> str:
    """Returns the service's message without the text that CloudFormation wraps around it."""
    framed = FRAME.search(reason)
    said = SERVICE.sub("", framed[1] if framed else reason)
    return said.strip().rstrip(".").strip() or "it gave no reason"


def is_capacity(reason: str) -> bool:
    """Returns whether the zone lacks capacity or the instance type, so that another zone may
    help.
    """
    return bool(CAPACITY.search(reason) or ELSEWHERE.search(reason))


def explain(event: StackEvent | None, what: str, where: str) -> CloudError:
    """Returns an error that explains the first failure."""
    if event is None:
        why, then = "CloudFormation gave no reason", "run make setup again"
        return CloudError(what, where=where, why=why, next=then, code="Failed")
    kind, said = short(event.type), words_of(event.reason)
    if is_capacity(event.reason):
        why = f"AWS has no capacity for this instance type now: {said}"
        then = "set other fleet.aws.zones, try later, or use a reservation (fleet.aws.capacity)"
        return CloudError(what, where=where, why=why, next=then, code=LACKS_CAPACITY)
    why = f"{event.logical}, {kind}: {said}"
    then = "fix what AWS reports, then run make setup again"
    for row in MEANINGS:
        if re.search(row["reason"], event.reason, re.IGNORECASE):
            why = f"{row['means']} ({event.logical}, {kind}): {said}"
            then = row["next"]
            break
    return CloudError(what, where=where, why=why, next=then, code="Failed")
