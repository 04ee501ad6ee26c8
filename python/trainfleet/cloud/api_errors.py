"""Turns AWS's refusals into CloudErrors, each of which says what failed, why, and what to type
next.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..process.install_paths import page
from ..trust.errors import CloudError, NotAsked
from ..trust.safe_output import visible

DENIED = {
    "AccessDenied",
    "AccessDeniedException",
    "UnauthorizedOperation",
    "AuthorizationError",
    "NotAuthorized",
    "AuthorizationErrorException",
    "UnauthorizedException",
    "Forbidden",
    "403",
}
EXPIRED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "TokenRefreshRequired",
    "CredentialsExpired",
}
UNKNOWN_KEY = {
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "InvalidAccessKeyId",
    "AuthFailure",
    "SignatureDoesNotMatch",
    "InvalidSignatureException",
    "IncompleteSignature",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
}
THROTTLED = {
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "RequestLimitExceeded",
    "TooManyRequestsException",
    "RequestThrottled",
    "RequestThrottledException",
    "SlowDown",
    "BandwidthLimitExceeded",
    "ProvisionedThroughputExceededException",
    "PriorRequestNotComplete",
    "EC2ThrottledException",
}
NO_REGION = {
    "OptInRequired",
    "SubscriptionRequiredException",
    "RegionDisabledException",
    "InvalidRegion",
}
CAPACITY = {
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientReservedInstanceCapacity",
    "InsufficientCapacity",
    "Unsupported",
    "SpotMaxPriceTooLow",
    "ReservationCapacityExceeded",
    "InsufficientCapacityOnOutpost",
}
# of IAM's actions
PREFIXES = {
    "resourcegroupstaggingapi": "tag",
    "service-quotas": "servicequotas",
    "efs": "elasticfilesystem",
}
ACTIONS = {
    "s3:ListBuckets": "s3:ListAllMyBuckets",
    "s3:HeadBucket": "s3:ListBucket",
    "s3:ListObjectsV2": "s3:ListBucket",
}
CREDENTIALS = (
    "set AWS_PROFILE or AWS_ACCESS_KEY_ID, or aws sso login; aws sts "
    "get-caller-identity tells whom AWS sees"
)
RENEW = (
    "aws sso login, or new keys in AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
    "AWS_SESSION_TOKEN; then the same again"
)
MOST = 600  # letters of AWS's message


def action(service: str, operation: str) -> str:
    """The name of an operation in a policy: `ec2:RunInstances`."""
    name = f"{PREFIXES.get(service, service)}:{operation}"
    return ACTIONS.get(name, name)


class NotAws(ValueError):
    """A web page came in place of an answer."""


@contextmanager
def explained(region: str, service: str, operation: str) -> Iterator[None]:
    """Whatever botocore raises here is raised as a CloudError."""
    try:
        yield
    except CloudError:
        raise
    except Exception as error:
        import botocore.exceptions

        if _is_unreadable(error):
            raise _strange(f"{service} {operation} in {region}", error) from error
        if not isinstance(
            error, (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)
        ):
            raise
        where = f"{service} {operation} in {region}"
        answer = getattr(error, "response", None)
        raise (
            _refused(where, service, operation, answer) if answer else _unanswered(where, error)
        ) from error


@contextmanager
def passing(*codes: str) -> Iterator[None]:
    """Ignores CloudErrors with one of these codes."""
    try:
        yield
    except CloudError as error:
        if error.code not in codes:
            raise


def _refused(where: str, service: str, operation: str, answer: dict[str, Any]) -> CloudError:
    code, said = _words(answer, "Code"), _words(answer, "Message")
    what, why, then = (
        f"AWS refuses {operation}",
        f"{code}: {said}",
        "fix what AWS names, then type the same command again",
    )
    if code in DENIED:
        named = re.search(r"not authorized to perform:? ([a-z0-9-]+:[A-Za-z*]+)", said)
        missing = named[1] if named else action(service, operation)
        what, why = (
            f"your credentials may not do {missing}",
            re.sub(r"Encoded authorization failure message:.*", "", why).strip(),
        )
        then = f"have {missing} allowed, or use other credentials (AWS_PROFILE)"
    elif code in EXPIRED:
        what, then = "your credentials have expired", RENEW
    elif code in UNKNOWN_KEY:
        what, then = "AWS does not know your credentials", CREDENTIALS
    elif code in THROTTLED:
        what, then = "AWS is throttling your account's requests", "the same again, in a minute"
    elif code in NO_REGION:
        what, then = (
            "your account can't use this service in this region",
            "fleet.aws.region: one that your account has enabled",
        )
    elif code in CAPACITY:
        what = "AWS has no such machines there now"
        then = "fleet.aws.zones: other zones; or fleet.aws.capacity: block or reservation"
    return CloudError(what, where=where, why=why, next=then, code=code)


def _is_unreadable(error: Exception) -> bool:
    """Tells whether botocore could not read an answer: on a page of HTML its parsers raise
    arbitrary errors.
    """
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, NotAws) or any(
        frame.f_globals.get("__name__") == "botocore.parsers" for frame, _ in frames
    )


def _strange(where: str, error: Exception) -> CloudError:
    what, why = (
        "the answer is not one of AWS's",
        f"a proxy or a login page may have given it; {_one_line(str(error))}",
    )
    then = "look at HTTPS_PROXY, NO_PROXY and AWS_ENDPOINT_URL, then the same again"
    return CloudError(what, where=where, why=why, next=then, code=type(error).__name__)


def _unanswered(where: str, error: Exception) -> CloudError:
    """No answer of AWS: no credentials, no way there, or a request that the model does not take."""
    import botocore.exceptions as known

    kind, why = type(error).__name__, _one_line(str(error))
    if isinstance(error, known.ParamValidationError):
        then = (
            f"the value in config.yaml that it comes from; {page('schema/README.md')} lists "
            "all keys"
        )
        return CloudError("AWS takes no such request", where=where, why=why, next=then, code=kind)
    if kind.startswith(
        ("UnauthorizedSSO", "SSOToken", "TokenRetrieval", "LoginRefresh", "LoginToken")
    ):
        return NotAsked(
            "your credentials have expired", where=where, why=why, next=RENEW, code="ExpiredToken"
        )
    if "Credential" in kind or isinstance(
        error, (known.ProfileNotFound, known.SSOError, known.ConfigNotFound)
    ):
        return NotAsked(
            "AWS can't be asked without credentials",
            where=where,
            why=why,
            next=CREDENTIALS,
            code=kind,
        )
    then = "look at this machine's network and at fleet.aws.region, then the same again"
    return NotAsked("AWS gives no answer", where=where, why=why, next=then, code=kind)


def _words(answer: dict[str, Any], key: str) -> str:
    error = answer.get("Error")
    return _one_line(str(error.get(key, ""))) if isinstance(error, dict) else ""


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))[:MOST]
