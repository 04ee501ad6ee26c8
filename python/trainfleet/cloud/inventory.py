"""Finds our resources in a region by tag, across all services that we use, with their costs.
Removes a config's resources until AWS confirms that they are gone. Reads only AWS, never local
files.

A removal deletes the stack first, because CloudFormation knows the deletion order. Other resources
with our tags, such as those that the stack failed to delete or had to keep, are then removed one by
one. Resources that are still in use are retried, because the network interfaces of an instance or a
file system disappear minutes after it. Resources without our tags are never removed.
"""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..trust.errors import CloudError
from . import clock, prices
from .calls import CODES, DENIED, Calls, Row
from .cloudformation import CONFIG, CREATED, OURS, PROJECT, CloudFormationStack, StackState
from .resource_types import (
    KINDS,
    LOCK,
    SCHEDULER_KINDS,
    ResourceKind,
    instances,
    is_gone,
    is_ours,
    tags_of,
)

AGAIN = 4.0  # seconds between two listings, because the first may miss a new resource
# services that the resource kind tables cover
KNOWN = ("ec2", "fsx", "s3", "ecr", "logs", "iam", "cloudformation", "batch", "sagemaker", "ssm")
BESIDE = ("AMI", "snapshot")  # kinds that do not need the stack's network
CREATED_AT = (
    *("LaunchTime", "CreationTime", "CreateTime", "StartTime"),
    *("CreateDate", "CreationDate", "createdAt"),
)
DAY = 24.0
CENT = 0.01  # US dollars per hour; a stored image or an address costs less


@dataclass(frozen=True)
class OwnedResource:
    """One of our resources. `since`: creation time (Unix), if known; `usd`: US dollars per hour,
    None if unknown.

    An entry without an ID represents a kind that these credentials may not list; `what` is the
    reason.
    """

    kind: str
    id: str
    config: str
    what: str = ""
    since: float | None = None
    usd: float | None = 0.0
    holds_data: bool = False
    row: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)
    removable: ResourceKind | None = field(default=None, compare=False, hash=False)

    def line(self) -> str:
        """Returns a line with kind, ID, cost per day, age and description."""
        if not self.id:
            return f"{self.kind:18} was not checked: {self.what}"
        cost = f"${self.usd * DAY:,.2f} a day" if self.usd else "free"
        if self.usd is None:
            cost = "price unknown"
        since = ""
        if self.since is not None:
            made = datetime.datetime.fromtimestamp(self.since)
            since = f"since {made.strftime('%Y-%m-%d %H:%M')}"
        parts = (f"{self.kind:18} {self.id:40}", f"{cost:16}", since, self.what)
        return "  ".join(filter(None, parts))


Found = Iterable[OwnedResource]
Look = Callable[[Calls, str | None], Found]


def find(calls: Calls, config: str | None = None) -> list[OwnedResource]:
    """Returns our resources, or those of one config: stacks first, then in removal order.

    A kind that these credentials may not list is represented by one entry without an ID.

    Raises:
        CloudError: AWS returned another error or did not respond, so resources may be missing.
    """
    kinds = ((kind.name, partial(_of_kind, kind)) for kind in (*SCHEDULER_KINDS, *KINDS))
    looks: list[tuple[str, Look]] = [("stack", _stacks), *kinds, ("any other", _others)]
    found: list[OwnedResource] = []
    for name, look in looks:
        try:
            found += look(calls, config)
        except CloudError as error:
            if error.code not in DENIED:
                raise
            found.append(OwnedResource(name, "", config or "", error.what))
    return found


def surely(calls: Calls, config: str | None) -> list[OwnedResource]:
    """Repeats `find` until two consecutive listings agree, and returns the last one."""

    def ids(found: list[OwnedResource]) -> set[tuple[str, str]]:
        return {(one.kind, one.id) for one in found}

    before, now = None, find(calls, config)
    while before is None or ids(before) != ids(now):
        clock.sleep(AGAIN)
        before, now = now, find(calls, config)
    return now


def require_seen(found: Found, region: str, verb: str) -> None:
    """Raises CloudError if these credentials may not list some resource kinds."""
    if rows := [f"  {one.line()}" for one in found if not one.id]:
        what = "\n".join([f"there may be more trainfleet resources in {region}", *rows])
        then = f"allow that, or use other credentials (AWS_PROFILE), then run {verb} again"
        raise CloudError(what, next=then, code="NotSeen")


def weighed(calls: Calls, found: Found) -> Iterator[OwnedResource]:
    """Yields the resources, with sizes and prices for buckets, which require extra requests."""
    for one in found:
        try:
            size = _size(calls, one) if one.kind == "bucket" else None
        except CloudError:  # denied or unanswered: the price stays unknown
            size = None
        what, usd = (one.what, one.usd) if size is None else prices.stored(one.kind, size)
        yield replace(one, what=what, usd=usd)


def _size(calls: Calls, one: OwnedResource) -> float | None:
    """Returns a bucket's size in bytes from CloudWatch, which lags by a day, or None if unknown."""
    if not one.holds_data:
        return 0.0
    names = {"BucketName": one.id, "StorageType": "StandardStorage"}
    now, days = clock.utc(), datetime.timedelta(days=3)
    points = _measured(calls, "AWS/S3", "BucketSizeBytes", "Average", names, now - days, now)
    newest = max(points, key=lambda point: point["Timestamp"], default=None)
    return newest and float(newest["Average"])


def _measured(
    calls: Calls,
    space: str,
    metric: str,
    statistic: str,
    names: Mapping[str, str],
    begin: datetime.datetime,
    end: datetime.datetime,
) -> list[Any]:
    """Returns a metric's daily data points from CloudWatch."""
    answer = calls(
        "cloudwatch",
        "GetMetricStatistics",
        Namespace=space,
        MetricName=metric,
        Period=86400,
        Statistics=[statistic],
        Dimensions=[{"Name": name, "Value": value} for name, value in names.items()],
        StartTime=begin,
        EndTime=end,
    )
    return list(answer.get("Datapoints", ()))


def table(found: Found) -> Iterator[str]:
    """Yields lines grouped by config: one for each resource that costs money or holds data, and one
    for all free resources.
    """
    rows = sorted(found, key=lambda one: one.config)
    for config, group in itertools.groupby(rows, key=lambda one: one.config):
        ours = list(group)
        dear = [one for one in ours if one.usd != 0.0 or one.holds_data]
        free = Counter(one.kind for one in ours if one not in dear)
        yield f"{config}: {total(ours)}"
        yield from (f"  {one.line()}" for one in dear)
        if free:
            counts = sorted(free.items())
            kinds = (f"{count} {kind}" if count > 1 else kind for kind, count in counts)
            yield f"  free: {', '.join(kinds)}"


def total(found: Found) -> str:
    """Returns the resources' total cost as text."""
    found = list(found)
    known = sum(one.usd or 0.0 for one in found) * DAY
    unknown = sum(one.usd is None for one in found)
    return f"${known:,.2f} a day" + (f", and {unknown} of unknown price" if unknown else "")


def costing(found: Found) -> list[str]:
    """Returns a line for each resource that holds no data and costs at least a cent per hour or has
    an unknown price, followed by their total. Empty if there are no such resources.
    """
    priced = [one for one in found if (one.usd is None or one.usd >= CENT) and not one.holds_data]
    hourly = sum(one.usd or 0.0 for one in priced)
    return [*(one.line() for one in priced), f"${hourly:,.2f} an hour"] if priced else []


def _stacks(calls: Calls, config: str | None) -> Found:
    for row in calls.pages("cloudformation", "DescribeStacks", "Stacks"):
        if is_ours(tags := tags_of(row.get("Tags")), config):
            name, owner, since = row["StackName"], tags.get(CONFIG, ""), row["CreationTime"]
            status = row["StackStatus"]
            yield OwnedResource("stack", name, owner, status, _seconds(since), row=row)


def _of_kind(kind: ResourceKind, calls: Calls, config: str | None) -> Iterator[OwnedResource]:
    for id_, tags, row in kind.find(calls, config):
        what, usd = prices.cost_of(kind.name, row)
        is_image = kind.name in BESIDE and LOCK in tags
        stays = is_image or _holds_data(calls, kind.name, id_, row)
        since, owner = _since(row, tags), tags.get(CONFIG, "")
        yield OwnedResource(kind.name, id_, owner, what, since, usd, stays, row, kind)


def _others(calls: Calls, config: str | None) -> Found:
    """Yields our resources in services that no kind covers. `make ls` reports them, but no command
    removes them.
    """
    wanted = [{"Key": PROJECT, "Values": [OURS]}]
    if config:
        wanted.append({"Key": CONFIG, "Values": [config]})
    for row in calls.pages(
        "resourcegroupstaggingapi", "GetResources", "ResourceTagMappingList", TagFilters=wanted
    ):
        arn, tags = row["ResourceARN"], tags_of(row.get("Tags"))
        service = arn.split(":")[2]
        if service not in KNOWN:
            yield OwnedResource(service, arn, tags.get(CONFIG, ""), "", _since({}, tags), None)


def _holds_data(calls: Calls, kind: str, id_: str, row: Row) -> bool:
    """Returns whether a resource holds data that can't be recreated. True if unknown."""
    try:
        if kind == "bucket":
            versions = calls("s3", "ListObjectVersions", Bucket=id_, MaxKeys=1)
            return bool(versions.get("Versions") or versions.get("DeleteMarkers"))
        if kind == "file system":
            is_usable = row["Lifecycle"] not in ("CREATING", "FAILED", "DELETING")
            return is_usable and _written(calls, id_, row) != 0
    except CloudError as error:
        return error.code not in ("NoSuchBucket", "FileSystemNotFound")
    return kind == "backup"


def _written(calls: Calls, id_: str, row: Row) -> float | None:
    """Returns the bytes that clients have written to a file system, or None if unknown."""
    day, made, name = datetime.timedelta(days=1), row["CreationTime"], {"FileSystemId": id_}
    points = _measured(
        calls, "AWS/FSx", "DataWriteBytes", "Sum", name, made - day, clock.utc() + day
    )
    sums = [point["Sum"] for point in points]
    return sum(sums) if sums else None


def _since(row: Row, tags: Mapping[str, str]) -> float | None:
    """Returns a resource's creation time, from its service or else from its tag."""
    for key in CREATED_AT:
        if key in row:
            return _seconds(row[key])
    try:
        return datetime.datetime.fromisoformat(tags.get(CREATED, "")).timestamp()
    except ValueError:
        return None


def _seconds(moment: Any) -> float | None:
    if isinstance(moment, datetime.datetime):
        return moment.timestamp()
    return float(moment) if isinstance(moment, int | float) else None


PAUSE = 15.0  # seconds between rounds
PATIENCE = 900.0  # give up after this many seconds without a removal
ROUNDS = 3  # attempts to delete a stack
LATER = CODES["in use"] | CODES["unanswered"]  # errors that may be temporary
Say = Callable[[str], None]


@dataclass
class Sweep:
    """Removes one config's resources.

    `troubles`: why a resource could not be removed yet, by ID. `denied`: IDs of resources that
    these credentials may not remove.
    """

    calls: Calls
    stack: CloudFormationStack
    say: Say
    troubles: dict[str, str] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)

    def delete_stack(self) -> None:
        """Deletes the stack, and waits until it is gone or can't be deleted. First cancels or waits
        for any change that another command started.
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
        """Waits for changes that would delay the stack's deletion, then returns the stack."""
        state = self.stack.look()
        if state and state.status == "UPDATE_IN_PROGRESS":
            self._try(state.id, self.stack.cancel_update)
        if state and state.busy and not state.status.startswith("CREATE"):
            state, _ = self.stack.follow(state, lambda *_: None)
        return state

    def _try(self, id_: str, act: Callable[[], object]) -> bool:
        """Runs one step and returns whether it succeeded. If the step is denied or must be retried,
        records the reason in `troubles`.
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
        """Removes the chosen resources, retrying until they are gone or progress stops."""
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
            clock.sleep(PAUSE)

    def _ask(self, one: OwnedResource, asked: set[str]) -> None:
        """Requests a resource's deletion, unless it was already requested or is in progress."""
        kind = one.removable
        if kind is None or one.id in asked or _is_going(one):
            return
        if self._try(one.id, lambda: kind.remove(self.calls, one.id, one.row)):
            self.say(f"removed {one.kind} {one.id}")
            asked.add(one.id)

    def end_instances(self) -> None:
        """Terminates all instances up front, because deleting the stack takes longer."""
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


def strangers(calls: Calls, found: Found) -> list[str]:
    """Returns one line per foreign network interface in our VPCs, because they block the deletion
    of the VPC.
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
