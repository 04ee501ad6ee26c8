"""Explains why a stack could not be created, and suggests the next step."""

from __future__ import annotations

import re
from pathlib import Path

from ..config.tables import read_table
from ..trust.errors import CloudError
from .cloudformation import StackEvent, short

# CloudFormation's text around a service's message
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
LACKS_CAPACITY = "InsufficientCapacity"  # code of the error if a zone has no capacity
MEANINGS = read_table(Path(__file__).with_name("stack_errors.yaml"))


def words_of(reason: str) -> str:
    """Returns the service's message without CloudFormation's text around it."""
    framed = FRAME.search(reason)
    said = SERVICE.sub("", framed[1] if framed else reason)
    return said.strip().rstrip(".").strip() or "it gave no reason"


def is_capacity(reason: str) -> bool:
    """Returns whether the zone lacks capacity or the type, in which case another zone may help."""
    return bool(CAPACITY.search(reason) or ELSEWHERE.search(reason))


def explain(event: StackEvent | None, what: str, where: str) -> CloudError:
    """Returns the error for the first failure."""
    if event is None:
        why, then = "CloudFormation names no reason", "run make setup again"
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
