"""Explains why a stack could not be made, in plain words: what CloudFormation's reasons mean, and
what to type next.
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
QUOTA = "make plan names the quota and the command that asks for more"
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
        "your account has as many VPCs as it may",
        "fleet.aws.vpc: one that you have",
    ),
    (
        r"maximum number of addresses|AddressLimitExceeded",
        "your account has as many elastic addresses as it may",
        "release one: aws ec2 describe-addresses",
    ),
    (
        r"maximum number of internet gateways|InternetGatewayLimitExceeded",
        "your account has as many internet gateways as it may",
        "fleet.aws.vpc: a VPC that you have",
    ),
    (
        r"not authorized to perform|AccessDenied|UnauthorizedOperation",
        "your credentials may not make it",
        "have that action allowed, or use other credentials (AWS_PROFILE)",
    ),
    (
        r"security token.*expired|ExpiredToken",
        "your credentials expired on the way",
        "aws sso login, then make setup again",
    ),
    (
        r"free addresses|InsufficientFreeAddresses|InsufficientCidr",
        "the subnet has too few free addresses",
        "fleet.aws.subnets: a larger one",
    ),
    (
        r"bucket.*already (exists|owned)|BucketAlready",
        "a bucket of that name exists already",
        "fleet.aws.bucket: another name, or null",
    ),
    (
        r"InvalidAMI|image id .* does not exist|ami-\w+.*not (exist|found)",
        "the machine image does not exist in this region",
        "fleet.aws.ami: null takes the platform's own",
    ),
    (
        r"key pair .* does not exist|InvalidKeyPair",
        "the key pair does not exist in this region",
        "fleet.aws.key_pair: one of aws ec2 describe-key-pairs",
    ),
    (
        r"reservation.*(does not exist|not found|expired)|InvalidCapacityReservation",
        "the capacity reservation does not exist, or has ended",
        "fleet.aws.reservation: one of aws ec2 describe-capacity-reservations",
    ),
    (
        r"already exists",
        "something of that name is there already",
        "make ls shows what is ours; another name in config.yaml",
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
    """Tells whether another zone may have what this one lacks: machines, or the type at all."""
    return bool(CAPACITY.search(reason) or ELSEWHERE.search(reason))


def explain(event: StackEvent | None, what: str, where: str) -> CloudError:
    """The error for what failed first."""
    if event is None:
        return CloudError(
            what,
            where=where,
            why="CloudFormation names no reason",
            next="make setup again",
            code="Failed",
        )
    said, kind = words_of(event.reason), event.type.removeprefix("AWS::").replace("::", " ")
    if is_capacity(event.reason):
        then = "fleet.aws.zones: other zones; later again; or a reservation (fleet.aws.capacity)"
        return CloudError(
            what,
            where=where,
            why=f"AWS has no such machines there now: {said}",
            next=then,
            code="InsufficientCapacity",
        )
    for pattern, meaning, then in MEANINGS:
        if re.search(pattern, event.reason, re.IGNORECASE):
            why = f"{meaning} ({event.logical}, {kind}): {said}"
            return CloudError(what, where=where, why=why, next=then, code="Failed")
    then = "fix what AWS names, then make setup again"
    return CloudError(
        what, where=where, why=f"{event.logical}, {kind}: {said}", next=then, code="Failed"
    )
