"""Compares two templates: which resources of a stack an update would make, remove, change or
replace.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Resources = Mapping[str, Mapping[str, Any]]
WIDTH = 100  # columns
SIGNS = {"made": "+", "removed": "-", "changed": "~", "replaced": "±"}
# Properties of ours that CloudFormation can only change by replacing the resource (its resource
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
    """A change to a resource: its logical id, its kind, and made, removed, changed or replaced."""

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
    """Describes the change set for people: how many of each kind in a new stack, each resource in
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
        yield "  nothing: the stack is as it should be"
    yield from (f"  {change}" for change in changes)
    nodes = [
        change.name
        for change in changes
        if change.what == "replaced" and change.kind == "AWS::EC2::Instance"
    ]
    if nodes:
        yield (f"  warning: {len(nodes)} nodes are replaced, as their launch template has changed")
