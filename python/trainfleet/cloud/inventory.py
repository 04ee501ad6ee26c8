"""Finds our resources in a region by tag, over every service that is used, with their cost; it
reads nothing from this machine.
"""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..trust.errors import CloudError
from . import clock, prices
from .api_errors import DENIED
from .calls import Calls
from .cloudformation import CONFIG, CREATED, OURS, PROJECT
from .resource_types import KINDS, LOCK, ResourceKind, Row, is_ours, tags_of
from .scheduler_resource_types import SCHEDULER_KINDS

AGAIN = 4.0  # seconds between two listings: the first may lack a new resource
# Services whose resources the kinds find.
KNOWN = ("ec2", "fsx", "s3", "ecr", "logs", "iam", "cloudformation", "batch", "sagemaker", "ssm")
BESIDE = ("AMI", "snapshot")  # kinds that can stay without a stack and its network
DAY = 24.0
CENT = 0.01  # dollars an hour; a stored image costs less, and so does an address


@dataclass(frozen=True)
class OwnedResource:
    """One of our resources. `since`: seconds since 1970, if known; `usd`: dollars an hour, None if
    unknown.

    Without an id it represents all of its kind, which these credentials may not list: `what`
    says why.
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
        """Returns a line to read: kind, id, description, age and dollars per day."""
        if not self.id:
            return f"{self.kind:18} was not checked: {self.what}"
        cost = (
            "price unknown"
            if self.usd is None
            else f"${self.usd * DAY:,.2f} a day"
            if self.usd
            else "free"
        )
        since = (
            ""
            if self.since is None
            else f"since {datetime.datetime.fromtimestamp(self.since).strftime('%Y-%m-%d %H:%M')}"
        )
        return "  ".join(
            filter(None, (f"{self.kind:18} {self.id:40}", f"{cost:16}", since, self.what))
        )


Look = Callable[[Calls, str | None], Iterable[OwnedResource]]


def find(calls: Calls, config: str | None = None) -> list[OwnedResource]:
    """Returns all our resources, or those of one config, in the order in which they can be removed,
    the stacks first.

    A kind that these credentials may not list is one entry, without an id.

    Raises:
        CloudError: a service can't be asked, so its resources are unknown.
    """
    looks: list[tuple[str, Look]] = [
        ("stack", _stacks),
        *((kind.name, _finder(kind)) for kind in (*SCHEDULER_KINDS, *KINDS)),
    ]
    found: list[OwnedResource] = []
    for name, look in (*looks, ("any other", _others)):
        try:
            found += look(calls, config)
        except CloudError as error:
            if error.code not in DENIED:
                raise
            found.append(OwnedResource(name, "", config or "", error.what))
    return found


def surely(calls: Calls, config: str | None) -> list[OwnedResource]:
    """Returns the same as `find`, repeated until two listings in a row agree."""
    before, now = None, find(calls, config)
    while before is None or {(one.kind, one.id) for one in before} != {
        (one.kind, one.id) for one in now
    }:
        clock.sleep(AGAIN)
        before, now = now, find(calls, config)
    return now


def require_seen(found: Iterable[OwnedResource], region: str, verb: str) -> None:
    """Raises CloudError with every kind that these credentials may not list."""
    if rows := [f"  {one.line()}" for one in found if not one.id]:
        what = "\n".join([f"there may be more trainfleet resources in {region}", *rows])
        then = f"allow that, or use other credentials (AWS_PROFILE), then run {verb} again"
        raise CloudError(what, next=then, code="NotSeen")


def weighed(calls: Calls, found: Iterable[OwnedResource]) -> Iterator[OwnedResource]:
    """Adds size and price to resources that are paid by their contents: only for printing, because
    it takes more requests.
    """
    for one in found:
        try:
            size = _size(calls, one) if one.kind == "bucket" else None
        except CloudError:  # a denied or late request leaves the resource without a price
            size = None
        what, usd = (one.what, one.usd) if size is None else prices.stored(one.kind, size)
        yield replace(one, what=what, usd=usd)


def _size(calls: Calls, one: OwnedResource) -> float | None:
    """Returns the bytes in a bucket, which CloudWatch reports a day later."""
    if not one.holds_data:
        return 0.0
    now, days = (
        datetime.datetime.fromtimestamp(clock.now(), datetime.UTC),
        datetime.timedelta(days=3),
    )
    answer = calls(
        "cloudwatch",
        "GetMetricStatistics",
        Namespace="AWS/S3",
        MetricName="BucketSizeBytes",
        Period=86400,
        Statistics=["Average"],
        Dimensions=[
            {"Name": "BucketName", "Value": one.id},
            {"Name": "StorageType", "Value": "StandardStorage"},
        ],
        StartTime=now - days,
        EndTime=now,
    )
    newest = max(answer.get("Datapoints", ()), key=lambda point: point["Timestamp"], default=None)
    return newest and float(newest["Average"])


def table(found: Iterable[OwnedResource]) -> Iterator[str]:
    """Lists resources by config: a line for each that costs money or holds data, and one line for
    the free ones.
    """
    rows = sorted(found, key=lambda one: one.config)
    for config, group in itertools.groupby(rows, key=lambda one: one.config):
        ours = list(group)
        dear = [one for one in ours if one.usd != 0.0 or one.holds_data]
        free = Counter(one.kind for one in ours if one not in dear)
        yield f"{config}: {total(ours)}"
        yield from (f"  {one.line()}" for one in dear)
        if free:
            kinds = (
                f"{count} {kind}" if count > 1 else kind for kind, count in sorted(free.items())
            )
            yield f"  free: {', '.join(kinds)}"


def total(found: Iterable[OwnedResource]) -> str:
    """Describes their total cost in words."""
    found = list(found)
    known = sum(one.usd or 0.0 for one in found) * DAY
    unknown = sum(one.usd is None for one in found)
    return f"${known:,.2f} a day" + (f", and {unknown} of unknown price" if unknown else "")


def costing(found: Iterable[OwnedResource]) -> list[str]:
    """Returns a line for each resource that costs a cent an hour or an unknown price and holds no
    data, then dollars an hour; empty without such resources.
    """
    priced = [one for one in found if (one.usd is None or one.usd >= CENT) and not one.holds_data]
    hourly = sum(one.usd or 0.0 for one in priced)
    return [*(one.line() for one in priced), f"${hourly:,.2f} an hour"] if priced else []


def _stacks(calls: Calls, config: str | None) -> Iterable[OwnedResource]:
    for row in calls.pages("cloudformation", "DescribeStacks", "Stacks"):
        if is_ours(tags := tags_of(row.get("Tags")), config):
            yield OwnedResource(
                "stack",
                row["StackName"],
                tags.get(CONFIG, ""),
                row["StackStatus"],
                _seconds(row["CreationTime"]),
                0.0,
                row=row,
            )


def _finder(kind: ResourceKind) -> Look:
    def look(calls: Calls, config: str | None) -> Iterator[OwnedResource]:
        for id_, tags, row in kind.find(calls, config):
            (what, usd), stays = (
                prices.cost_of(kind.name, row),
                _stays(calls, kind.name, id_, tags, row),
            )
            yield OwnedResource(
                kind.name, id_, tags.get(CONFIG, ""), what, _since(row, tags), usd, stays, row, kind
            )

    return look


def _others(calls: Calls, config: str | None) -> Iterable[OwnedResource]:
    """Finds our resources in services that no kind covers: they are reported but never removed."""
    wanted = [
        {"Key": PROJECT, "Values": [OURS]},
        *([{"Key": CONFIG, "Values": [config]}] if config else []),
    ]
    for row in calls.pages(
        "resourcegroupstaggingapi", "GetResources", "ResourceTagMappingList", TagFilters=wanted
    ):
        service = row["ResourceARN"].split(":")[2]
        if service not in KNOWN:
            tags = tags_of(row.get("Tags"))
            yield OwnedResource(
                service, row["ResourceARN"], tags.get(CONFIG, ""), "", _since({}, tags), None
            )


def _stays(calls: Calls, kind: str, id_: str, tags: Mapping[str, str], row: Row) -> bool:
    """Tells whether only a purge removes it: it holds data, or it is a machine image for a later
    setup, or that image's snapshot.
    """
    return (kind in BESIDE and LOCK in tags) or _holds_data(calls, kind, id_, row)


def _holds_data(calls: Calls, kind: str, id_: str, row: Row) -> bool:
    """Tells whether it holds data that can't be made again; True if unknown."""
    try:
        if kind == "bucket":
            versions = calls("s3", "ListObjectVersions", Bucket=id_, MaxKeys=1)
            return bool(versions.get("Versions") or versions.get("DeleteMarkers"))
        if kind == "file system":
            return (
                row["Lifecycle"] not in ("CREATING", "FAILED", "DELETING")
                and _written(calls, id_, row) != 0
            )
    except CloudError as error:
        return error.code not in ("NoSuchBucket", "FileSystemNotFound")
    return kind == "backup"


def _written(calls: Calls, id_: str, row: Row) -> float | None:
    """Returns the bytes that clients have ever written to a file system (CloudWatch, AWS/FSx
    DataWriteBytes); None if unknown.
    """
    day = datetime.timedelta(days=1)
    made = row["CreationTime"]
    end = datetime.datetime.fromtimestamp(clock.now(), datetime.UTC) + day
    answer = calls(
        "cloudwatch",
        "GetMetricStatistics",
        Namespace="AWS/FSx",
        MetricName="DataWriteBytes",
        Period=86400,
        Statistics=["Sum"],
        Dimensions=[{"Name": "FileSystemId", "Value": id_}],
        StartTime=made - day,
        EndTime=end,
    )
    sums = [point["Sum"] for point in answer.get("Datapoints", ())]
    return sum(sums) if sums else None


def _since(row: Row, tags: Mapping[str, str]) -> float | None:
    """Returns when it was made, by its service or else by its tag."""
    for key in (
        "LaunchTime",
        "CreationTime",
        "CreateTime",
        "StartTime",
        "CreateDate",
        "CreationDate",
        "createdAt",
    ):
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
