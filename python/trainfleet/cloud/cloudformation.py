"""One CloudFormation stack: creates, updates and deletes it, follows its events, and compares two
templates: which resources an update would make, remove, change or replace.

CloudFormation continues even if the process that called it ends. So each step first reads
the stack, joins a change that another command began, and keeps no state between two commands.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..trust.errors import CloudError
from . import clock
from .api_errors import CODES
from .calls import Calls
from .template_inputs import pairs

Resources = Mapping[str, Mapping[str, Any]]
WIDTH = 100  # columns
SIGNS = {"made": "+", "removed": "-", "changed": "~", "replaced": "±"}
# Our properties that CloudFormation can only change by replacing the resource (its resource
# reference).
FIXED = {
    "AWS::EC2::VPC": {"CidrBlock"},
    "AWS::EC2::Subnet": {"CidrBlock", "AvailabilityZone", "VpcId"},
    "AWS::EC2::Instance": {"LaunchTemplate"},
    "AWS::EC2::KeyPair": {"KeyName", "PublicKeyMaterial"},
    "AWS::EC2::PlacementGroup": {"Strategy"},
    "AWS::S3::Bucket": {"BucketName"},
    "AWS::Logs::LogGroup": {"LogGroupName"},
    "AWS::FSx::FileSystem": {"SubnetIds", "SecurityGroupIds", "FileSystemTypeVersion"},
    "AWS::FSx::DataRepositoryAssociation": {"FileSystemId", "FileSystemPath", "DataRepositoryPath"},
}


@dataclass(frozen=True)
class Change:
    """A change to a resource: its logical id, its kind, and whether it is made, removed, changed or
    replaced.
    """

    name: str
    kind: str
    what: str

    def __str__(self) -> str:
        return (
            f"{SIGNS[self.what]} {self.name}  {self.kind.removeprefix('AWS::').replace('::', ' ')}"
        )


def compare(before: Resources, after: Resources) -> list[Change]:
    """Lists every change, in the order of the templates. A resource that names a changed launch
    template's version is replaced.
    """
    changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
    stale = {name for name in changed if after[name]["Type"] == "AWS::EC2::LaunchTemplate"}
    return [
        change
        for name in (*after, *(name for name in before if name not in after))
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
    if kind == "AWS::EC2::Instance" and any(
        f'"{template}"' in str(after[name]).replace("'", '"') for template in stale
    ):
        return Change(name, kind, "replaced")
    if name not in changed:
        return None
    old, new = before[name].get("Properties", {}), after[name].get("Properties", {})
    fixed = {key for key in FIXED.get(kind, ()) if old.get(key) != new.get(key)}
    return Change(name, kind, "replaced" if fixed else "changed")


def describe(changes: list[Change], is_new: bool) -> Iterator[str]:
    """Describes the change set to a reader: how many of each kind in a new stack, each resource in
    an existing one.
    """
    if is_new:
        counts = Counter(change.kind.removeprefix("AWS::").replace("::", " ") for change in changes)
        line = f"a new stack of {len(changes)} resources: " + ", ".join(
            f"{n} {kind}" for kind, n in counts.items()
        )
        yield textwrap.fill(
            line, WIDTH, initial_indent="  + ", subsequent_indent="    ", break_on_hyphens=False
        )
        return
    if not changes:
        yield "  nothing; the stack is up to date"
    yield from (f"  {change}" for change in changes)
    nodes = [
        change.name
        for change in changes
        if change.what == "replaced" and change.kind == "AWS::EC2::Instance"
    ]
    if nodes:
        yield (f"  warning: {len(nodes)} nodes are replaced: their launch template changed")


POLL = 5.0  # seconds between two polls of a stack that is being changed
# seconds without any event until following ends: CloudFormation itself gives up before that
PATIENCE = 3 * 3600.0
MISSES = 20  # polls in a row that AWS leaves unanswered or throttles
CAPABILITIES = ["CAPABILITY_NAMED_IAM"]
PROJECT, CONFIG, CREATED = (f"trainfleet:{name}" for name in ("project", "config", "created"))
OURS = "trainfleet"  # the value of PROJECT
# a resource's logical id, its state, and the message about it
Show = Callable[[str, str, str], None]


@dataclass(frozen=True)
class StackState:
    """A stack, from DescribeStacks."""

    id: str
    status: str
    reason: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Tells whether CloudFormation is changing the stack."""
        return self.status.endswith("_IN_PROGRESS") and self.status != "REVIEW_IN_PROGRESS"

    @property
    def whole(self) -> bool:
        """Tells whether the stack's last change or rollback has ended, so it can be changed."""
        return self.status in ("CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE")

    @property
    def gone(self) -> bool:
        return self.status == "DELETE_COMPLETE"


@dataclass(frozen=True)
class StackEvent:
    """An event of one resource. `own`: it is the stack's own event."""

    id: str
    logical: str
    physical: str
    type: str
    status: str
    reason: str
    own: bool

    @property
    def failed(self) -> bool:
        """Tells whether the failure began here: a cancelled resource is only a consequence."""
        return (
            self.status.endswith("_FAILED")
            and not self.own
            and not re.search("cancelled|not been attempted", self.reason)
        )


@dataclass
class CloudFormationStack:
    """The stack of this name, if it is ours. `followed`: the event up to which it has been read."""

    calls: Calls
    name: str
    config: str
    followed: str = ""

    def look(self, id_: str = "") -> StackState | None:
        """Returns the stack's present state; None without a stack. By `id` it also finds a deleted
        one.

        Raises:
            CloudError: a stack of that name was not made by this config.
        """
        try:
            rows = self.calls("cloudformation", "DescribeStacks", StackName=id_ or self.name)[
                "Stacks"
            ]
        except CloudError as error:
            if error.code == "ValidationError" and "does not exist" in error.why:
                return None
            raise
        state = _state(rows[0])
        if state.tags.get(PROJECT) != OURS or state.tags.get(CONFIG) != self.config:
            what = f"the stack {self.name} exists, but this config did not make it"
            then = "set another name in config.yaml, or delete that stack yourself"
            raise CloudError(
                what, where=f"cloudformation in {self.calls.region}", next=then, code="Foreign"
            )
        return state

    def create(self, template: str, tags: Mapping[str, str], token: str) -> StackState:
        """Starts the creation; a token that is sent twice starts only one. A failure removes
        everything that was made.
        """
        answer = self.calls("cloudformation", "CreateStack", **self.creation(template, tags, token))
        # just made, but not listed yet
        return self.look(answer["StackId"]) or StackState(answer["StackId"], "CREATE_IN_PROGRESS")

    def creation(self, template: str, tags: Mapping[str, str], token: str) -> dict[str, Any]:
        """Returns the request to CreateStack."""
        return self.change(template) | {
            "OnFailure": "DELETE",
            "ClientRequestToken": token,
            "Tags": pairs(tags),
        }

    def change(self, template: str) -> dict[str, Any]:
        """Returns the request to UpdateStack. The values are the defaults of the template's
        parameters.
        """
        return {"StackName": self.name, "TemplateBody": template, "Capabilities": CAPABILITIES}

    def update(self, template: str) -> bool:
        """Starts an update and keeps the tags. Returns False if the stack already matches the
        template.
        """
        self._catch_up()
        try:
            self.calls("cloudformation", "UpdateStack", **self.change(template))
        except CloudError as error:
            if "No updates are to be performed" in error.why:
                return False
            raise
        return True

    def delete(self) -> None:
        """Starts the deletion, unless the stack does not exist or is being deleted."""
        self._catch_up()
        self.calls("cloudformation", "DeleteStack", StackName=self.name)

    def cancel_update(self) -> None:
        """Rolls back an update in progress."""
        self.calls("cloudformation", "CancelUpdateStack", StackName=self.name)

    def resources(self) -> dict[str, str]:
        """Returns the stack's present resources: logical id → physical id."""
        rows = self.calls.pages(
            "cloudformation", "ListStackResources", "StackResourceSummaries", StackName=self.name
        )
        return {
            row["LogicalResourceId"]: row["PhysicalResourceId"]
            for row in rows
            if row.get("PhysicalResourceId")
            and not row["ResourceStatus"].startswith("DELETE_COMPLETE")
        }

    def template(self) -> Mapping[str, Any]:
        """Returns the stack's present template."""
        body = self.calls("cloudformation", "GetTemplate", StackName=self.name)["TemplateBody"]
        found = json.loads(body) if isinstance(body, str) else body
        return found if isinstance(found, dict) else {}

    def follow(self, state: StackState, show: Show) -> tuple[StackState, StackEvent | None]:
        """Follows the stack until CloudFormation has finished. Returns its state, and the first
        failure if any.

        Raises:
            CloudError: AWS does not answer for a long time, or CloudFormation makes no progress.
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
                raise CloudError(
                    what,
                    where=f"cloudformation in {self.calls.region}",
                    next="run make setup again, or make clean",
                )
            clock.sleep(POLL)

    def _news(self, id_: str) -> Iterator[StackEvent]:
        """Yields the events since the last poll, the oldest first."""
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
        """Skips all past events, so that only new ones are shown."""
        if self.look():
            list(self._news(self.name))


def _state(row: Mapping[str, Any]) -> StackState:
    return StackState(
        row["StackId"],
        row["StackStatus"],
        row.get("StackStatusReason", ""),
        {tag["Key"]: tag["Value"] for tag in row.get("Tags", ())},
        {out["OutputKey"]: out["OutputValue"] for out in row.get("Outputs", ())},
        {one["ParameterKey"]: one["ParameterValue"] for one in row.get("Parameters", ())},
    )


def _event(row: Mapping[str, Any]) -> StackEvent:
    own = (
        row["ResourceType"] == "AWS::CloudFormation::Stack"
        and row.get("PhysicalResourceId") == row["StackId"]
    )
    return StackEvent(
        row["EventId"],
        row["LogicalResourceId"],
        row.get("PhysicalResourceId", ""),
        row["ResourceType"],
        row["ResourceStatus"],
        row.get("ResourceStatusReason", ""),
        own,
    )


def _tell(event: StackEvent, show: Show) -> None:
    """Shows a resource's line: its kind while it is in progress, its id when done, the reason if it
    failed.
    """
    if event.own:
        return
    kind = event.type.removeprefix("AWS::").replace("::", " ")
    if event.status.endswith("_FAILED"):
        cancelled = not event.failed
        show(
            event.logical,
            "cancelled" if cancelled else "FAILED",
            kind if cancelled else f"{kind}: {event.reason}",
        )
    elif event.status.endswith("_IN_PROGRESS"):
        show(event.logical, "deleting" if event.status.startswith("DELETE") else "working", kind)
    else:
        words = {
            "CREATE_COMPLETE": "made",
            "UPDATE_COMPLETE": "changed",
            "DELETE_COMPLETE": "deleted",
            "DELETE_SKIPPED": "kept",
        }
        show(event.logical, words.get(event.status, "done"), f"{kind} {event.physical}")
