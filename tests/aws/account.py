"""A pretended AWS account: one region whose services remember what was made, charge for it, refuse, fail and forget as AWS does.

    account = Account()
    account.capacity["us-east-1a", "p5.48xlarge"] = 2      insufficient capacity for the third
    account.faults["AWS::FSx::FileSystem"] = "..."          its creation fails, and the stack rolls back
    account.stuck["AWS::EC2::SecurityGroup"] = 2            its deletion fails twice
    account.denied.add("ec2:DescribeInstances")             account.lag = 3.0   seconds until what is new is seen
    account.may = lambda action, resource, context: True    what the user may do, by every request and by IAM's simulator
    account.throttled = lambda number: number % 5 == 0      account.expires_at = 40   the token's last request
    account.dies = (17, "after")                            the process that asks dies at that request

Time is the account's own: `account.now` goes on by SECOND_A_CALL with each request and by what `account.sleep` is told, and what
CloudFormation has begun goes on with it, whether or not anybody asks. With `speed` it follows this machine's clock instead.

What is real: nothing. What is as AWS documents it: requests and answers (botocore's own models judge both), states and their order,
dependencies between resources, the errors' codes. Other files of this folder hold the services, each a few answers.
"""

from __future__ import annotations

import copy
import datetime
import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SECOND_A_CALL = 0.2
START = 1_790_000_000.0  # seconds since 1970
Answer = Callable[..., dict[str, Any]]
ANSWERS: dict[tuple[str, str], Answer] = {}


class Killed(BaseException):
    """kill -9 of the process that asked: nothing of it runs on, no `except` and no `finally` of a normal error."""


class Refused(Exception):
    """What a service answers in place of a result: turned into botocore's ClientError where the request came from."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


def answers(service: str, operation: str) -> Callable[[Answer], Answer]:
    """Declares that a function answers an operation: (account, **request) → result."""

    def register(function: Answer) -> Answer:
        ANSWERS[service, operation] = function
        return function

    return register


@dataclass
class Thing:
    """Something that the account has. `more`: what its service alone knows of it; `made_by`: the stack, or the user."""

    kind: str
    id: str
    properties: dict[str, Any]
    tags: dict[str, str]
    since: float
    state: str = "available"
    more: dict[str, Any] = field(default_factory=dict)
    made_by: str = ""


class Account:
    """The region's state; `respond` is what a program's requests come to."""

    number = "111122223333"

    def __init__(self, region: str = "us-east-1", speed: float | None = None) -> None:
        self.region, self.speed = region, speed
        self.zones = [f"{region}{letter}" for letter in "abc"]
        self.things: dict[str, Thing] = {}
        self.stacks: dict[str, Any] = {}  # cloudformation.py
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.capacity: dict[tuple[str, str], int] = {}
        self.offered: dict[str, set[str]] = {}  # zone → types; a zone without an entry has all
        self.quotas: dict[str, float] = {}
        self.faults: dict[str, str] = {}
        self.stuck: dict[str, int] = {}
        self.denied: set[str] = set()
        self.may: Callable[[str, str, dict[str, str]], bool] | None = (
            None  # identity.py; None: everything
        )
        self.amis: dict[str, str] = {}  # SSM parameter → AMI, beside those of amis.py
        self.lacks_images: set[str] = set()  # of amis.py
        self.deprecated: set[str] = set()  # of those
        self.disk_key = ""  # by which it encrypts every disk
        self.sold: dict[str, Any] = {}  # offers of capacity blocks, by their ids (selling.py)
        self.lag = 0.0
        self.throttled: Callable[[int], bool] = lambda number: False
        self.expires_at: int | None = None
        self.dies: tuple[int, str] | None = None
        self.killer: type[BaseException] = Killed
        self.no_credentials = False
        self.began = time.time()
        self._now = START
        self._moment: float | None = None
        self._numbers = itertools.count(1)
        self._todo: list[tuple[float, int, Callable[[], None]]] = []
        self.on_launch: Callable[[Thing], None] = lambda instance: (
            None
        )  # where an instance is more than a record
        self.on_boot: Callable[[Thing], None] = lambda instance: (
            None
        )  # as an image that is made of it may do
        self.on_snapshot: Callable[[Thing], None] = lambda instance: None  # of its disk begins
        self.on_end: Callable[[Thing], None] = lambda instance: None
        self.public_of: Callable[[Thing], str] | None = None
        self.address_of: Callable[[Thing], str] | None = None

    # The clock

    @property
    def now(self) -> float:
        return self.began + (time.time() - self.began) * self.speed if self.speed else self._now

    def sleep(self, seconds: float) -> None:
        """What programs under test call in place of time.sleep."""
        if self.speed:
            time.sleep(seconds / self.speed)
        else:
            self._now += seconds
        self.settle()

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._todo, (self.moment + seconds, next(self._numbers), act))

    @property
    def moment(self) -> float:
        """When what is going on happens: now, or the earlier time of what is being caught up with."""
        return self._moment or self.now

    def settle(self) -> None:
        """Lets happen what is due."""
        while self._todo and self._todo[0][0] <= self.now:
            self._moment, _, act = heapq.heappop(self._todo)
            act()
        self._moment = None

    def rest(self) -> None:
        """Lets everything happen that is under way."""
        while self._todo:
            self._now = max(self._now, self._todo[0][0])
            if self.speed:
                time.sleep(max(0.0, (self._todo[0][0] - self.now) / self.speed) + 0.001)
            self.settle()

    # Requests

    def respond(
        self, region: str, service: str, operation: str, request: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The answer to one request, as boto3 would give it; botocore's ClientError where it is refused."""
        assert region == self.region, region
        number = len(self.calls)
        self.calls.append((service, operation, dict(request)))
        if self.dies == (number, "before"):
            raise self.killer
        self._now += SECOND_A_CALL
        self.settle()
        try:
            self._admit(service, operation, number)
            if (service, operation) not in ANSWERS:
                raise AssertionError(f"the pretended account has no {service} {operation}")
            answer = ANSWERS[service, operation](self, **request)
        except Refused as refused:
            self._die_after(number)
            raise client_error(refused, operation) from None
        self._die_after(number)
        return copy.deepcopy(answer)

    def _die_after(self, number: int) -> None:
        if self.dies == (number, "after"):
            raise self.killer

    def _admit(self, service: str, operation: str, number: int) -> None:
        if self.no_credentials:
            from botocore.exceptions import NoCredentialsError

            raise NoCredentialsError
        if self.expires_at is not None and number >= self.expires_at:
            raise Refused("ExpiredToken", "The security token included in the request is expired")
        if f"{service}:{operation}" in self.denied:
            who = f"arn:aws:sts::{self.number}:assumed-role/somebody/session"
            code = "UnauthorizedOperation" if service == "ec2" else "AccessDenied"
            raise Refused(code, f"User: {who} is not authorized to perform: {service}:{operation}")
        if self.may:
            from . import identity

            identity.admit(self, service, operation, self.calls[number][2])
        if self.throttled(number):
            raise Refused(
                "Throttling" if service == "cloudformation" else "RequestLimitExceeded",
                "Rate exceeded",
            )

    # Things

    def new_id(self, prefix: str) -> str:
        return f"{prefix}{next(self._numbers):017x}"

    def add(
        self,
        kind: str,
        id: str,
        properties: dict[str, Any],
        tags: Mapping[str, str],
        made_by: str = "",
        **more: Any,
    ) -> Thing:
        thing = self.things[id] = Thing(
            kind, id, properties, dict(tags), self.moment, more=more, made_by=made_by
        )
        return thing

    def of(self, kind: str) -> Iterator[Thing]:
        """The things of a kind that are seen by now."""
        yield from (
            thing
            for thing in list(self.things.values())
            if thing.kind == kind and self.is_seen(thing)
        )

    def is_seen(self, thing: Thing) -> bool:
        """Reads that follow a write closely may miss it, as EC2 documents (eventual consistency)."""
        return self.now - thing.since >= self.lag

    def get(self, kind: str, id: str, code: str) -> Thing:
        thing = self.things.get(id)
        if thing is None or thing.kind != kind:
            raise Refused(code, f"The {kind} '{id}' does not exist")
        return thing

    def users(self, thing: Thing) -> list[Thing]:
        """The living things that hold on to this one: their service refuses its deletion first."""
        return [
            other for other in self.things.values() if other is not thing and holds(other, thing)
        ]

    def living(self) -> list[Thing]:
        """What there is and costs, or stands in the way: all but terminated instances."""
        return [
            thing
            for thing in self.things.values()
            if thing.state not in ("terminated", "DELETE_COMPLETE")
        ]

    def ours(self) -> list[Thing]:
        return [
            thing for thing in self.living() if thing.tags.get("trainfleet:project") == "trainfleet"
        ]


LOOSE: dict[str, set[str]] = {  # what may go while others still name it: kind → kinds that name it
    "launch-template": {"instance", "autoscaling", "compute-environment"},
    "instance-profile": {"instance", "launch-template"},
    "role": {"vpc-flow-log", "stack", "instance", "job-definition", "compute-environment"},
    "bucket": {"data-repository-association", "role", "bucket"},
    "log-group": {"role", "vpc-flow-log", "job-definition"},
    "key-pair": {"instance", "launch-template"},
    "subnet": {
        "route-table",
        "instance",
        "file-system",
    },  # an instance's and a file system's interfaces are what holds it
    "security-group": {"instance", "file-system"},
    "vpc": {"instance", "file-system"},
    "nat-gateway": {"route-table"},
    "internet-gateway": {"route-table"},
    "file-system": {"role", "launch-template", "data-repository-association"},
}


def holds(other: Thing, thing: Thing) -> bool:
    """Whether `other` names `thing` in its properties so that it can't be deleted. A launch template holds on to nothing."""
    if other.state in ("terminated", "DELETE_COMPLETE") or other.kind in (
        "stack",
        "launch-template",
        "role",
    ):
        return False
    if other.kind in LOOSE.get(thing.kind, set()):
        return False
    return thing.id in strings(other.properties)


def strings(value: Any) -> set[str]:
    """Every text in a nested value."""
    match value:
        case str():
            return {value}
        case Mapping():
            return {text for part in value.values() for text in strings(part)}
        case list() | tuple():
            return {text for part in value for text in strings(part)}
    return set()


def client_error(refused: Refused, operation: str) -> Exception:
    from botocore.exceptions import ClientError

    answer = {
        "Error": {"Code": refused.code, "Message": refused.message},
        "ResponseMetadata": {"HTTPStatusCode": 400},
    }
    return ClientError(answer, operation)  # type: ignore[arg-type]


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def moment_of(seconds: float) -> datetime.datetime:
    """A time as boto3 gives it."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def tags_of(listed: Any) -> dict[str, str]:
    """Tags however a service writes them: a list of Key and Value, of key and value, or an object."""
    if isinstance(listed, Mapping):
        return dict(listed)
    return {
        tag.get("Key", tag.get("key")): tag.get("Value", tag.get("value", ""))
        for tag in listed or []
    }
