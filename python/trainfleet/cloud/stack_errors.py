"""Explains why a stack could not be made: what CloudFormation's reasons mean, and what to type
next.
"""

from __future__ import annotations

import re

from ..trust.errors import CloudError
from .cloudformation import StackEvent

# The frame around the services' own words.
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
QUOTA = "run make plan to see the quota and the command that requests more"
MEANINGS = (
    (
        r"vCPU (capacity|limit)|VcpuLimitExceeded",
        "your account's vCPU quota for this type is too small",
        QUOTA,
    ),
    (
        r"MaxSpotInstanceCountExceeded",
        "your account's quota for spot instances is too small",
        QUOTA,
    ),
    (
        r"maximum number of VPCs|VpcLimitExceeded",
        "your account has reached its limit of VPCs",
        "set fleet.aws.vpc to an existing VPC",
    ),
    (
        r"maximum number of addresses|AddressLimitExceeded",
        "your account has reached its limit of Elastic IP addresses",
        "release one (aws ec2 describe-addresses lists them)",
    ),
    (
        r"maximum number of internet gateways|InternetGatewayLimitExceeded",
        "your account has reached its limit of internet gateways",
        "set fleet.aws.vpc to an existing VPC",
    ),
    (
        r"not authorized to perform|AccessDenied|UnauthorizedOperation",
        "your credentials may not create it",
        "allow that action, or use other credentials (AWS_PROFILE)",
    ),
    (
        r"security token.*expired|ExpiredToken",
        "your credentials expired during the set-up",
        "run aws sso login, then make setup again",
    ),
    (
        r"free addresses|InsufficientFreeAddresses|InsufficientCidr",
        "the subnet has too few free addresses",
        "set a larger one in fleet.aws.subnets",
    ),
    (
        r"bucket.*already (exists|owned)|BucketAlready",
        "a bucket of that name exists already",
        "set fleet.aws.bucket to another name, or null",
    ),
    (
        r"InvalidAMI|image id .* does not exist|ami-\w+.*not (exist|found)",
        "the machine image does not exist in this region",
        "set fleet.aws.ami: null for the platform's own image",
    ),
    (
        r"key pair .* does not exist|InvalidKeyPair",
        "the key pair does not exist in this region",
        "set fleet.aws.key_pair to one that aws ec2 describe-key-pairs lists",
    ),
    (
        r"reservation.*(does not exist|not found|expired)|InvalidCapacityReservation",
        "the capacity reservation does not exist, or has ended",
        "set fleet.aws.reservation to one that aws ec2 describe-capacity-reservations lists",
    ),
    (
        r"already exists",
        "a resource of that name already exists",
        "run make ls to see our resources, or set another name in config.yaml",
    ),
)


def words_of(reason: str) -> str:
    """Returns the service's own words, without CloudFormation's frame."""
    framed = FRAME.search(reason)
    return (
        SERVICE.sub("", framed[1] if framed else reason).strip().rstrip(".").strip()
        or "it gave no reason"
    )


def is_capacity(reason: str) -> bool:
    """Tells whether another zone may have the machines or the type that this one lacks."""
    return bool(CAPACITY.search(reason) or ELSEWHERE.search(reason))


def explain(event: StackEvent | None, what: str, where: str) -> CloudError:
    """Returns the error for the first failure."""
    if event is None:
        return CloudError(
            what,
            where=where,
            why="CloudFormation names no reason",
            next="run make setup again",
            code="Failed",
        )
    said, kind = words_of(event.reason), event.type.removeprefix("AWS::").replace("::", " ")
    if is_capacity(event.reason):
        then = "set other fleet.aws.zones, try later, or use a reservation (fleet.aws.capacity)"
        return CloudError(
            what,
            where=where,
            why=f"AWS has no capacity for this instance type now: {said}",
            next=then,
            code="InsufficientCapacity",
        )
    for pattern, meaning, then in MEANINGS:
        if re.search(pattern, event.reason, re.IGNORECASE):
            why = f"{meaning} ({event.logical}, {kind}): {said}"
            return CloudError(what, where=where, why=why, next=then, code="Failed")
    then = "fix what AWS reports, then run make setup again"
    return CloudError(
        what, where=where, why=f"{event.logical}, {kind}: {said}", next=then, code="Failed"
    )
