"""Converts botocore's errors to CloudErrors with the cause and the next step."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config.tables import read_table
from ..process.install_paths import page
from ..trust.errors import CloudError, NotAsked
from ..trust.safe_output import visible

REFUSALS = read_table(Path(__file__).with_name("error_codes.yaml"))
CODES = {meaning: frozenset(row["codes"]) for meaning, row in REFUSALS.items()}
DENIED = CODES["denied"]
CREDENTIALS, RENEW = (REFUSALS[meaning]["next"] for meaning in ("unknown key", "expired"))
# IAM's names for services and actions that differ from botocore's
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
# prefixes of botocore's errors about expired credentials
RENEWABLE = ("UnauthorizedSSO", "SSOToken", "TokenRetrieval", "LoginRefresh", "LoginToken")
MOST = 600  # characters of AWS's message


def action(service: str, operation: str) -> str:
    """Returns the IAM action of an operation, such as `ec2:RunInstances`."""
    name = f"{PREFIXES.get(service, service)}:{operation}"
    return ACTIONS.get(name, name)


class NotAws(ValueError):
    """Response that is a web page, such as a proxy's, instead of AWS's response."""


@contextmanager
def explained(region: str, service: str, operation: str) -> Iterator[None]:
    """Reraises botocore's errors as CloudErrors."""
    where = f"{service} {operation} in {region}"
    try:
        yield
    except CloudError:
        raise
    except Exception as error:
        import botocore.exceptions

        if _is_unreadable(error):
            raise _strange(where, error) from error
        known = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)
        if not isinstance(error, known):
            raise
        if answer := getattr(error, "response", None):
            raise _refused(where, service, operation, answer) from error
        raise _unanswered(where, error) from error


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
    why = f"{code}: {said}"
    if code in DENIED:
        named = re.search(r"not authorized to perform:? ([a-z0-9-]+:[A-Za-z*]+)", said)
        missing = named[1] if named else action(service, operation)
        what = f"your credentials may not do {missing}"
        why = re.sub(r"Encoded authorization failure message:.*", "", why).strip()
        then = f"allow {missing}, or use other credentials (AWS_PROFILE)"
        return CloudError(what, where=where, why=why, next=then, code=code)
    row: dict[str, str] = next(
        (row for row in REFUSALS.values() if "what" in row and code in row["codes"]), {}
    )
    what = row.get("what", f"AWS refuses {operation}")
    then = row.get("next", "fix what AWS reports, then run the same command again")
    return CloudError(what, where=where, why=why, next=then, code=code)


def _is_unreadable(error: Exception) -> bool:
    """Returns whether botocore could not parse the response. Web pages make its parsers fail."""
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, NotAws) or any(
        frame.f_globals.get("__name__") == "botocore.parsers" for frame, _ in frames
    )


def _strange(where: str, error: Exception) -> CloudError:
    what = "the answer did not come from AWS"
    why = f"a proxy or a login page may have sent it; {_one_line(str(error))}"
    then = "check HTTPS_PROXY, NO_PROXY and AWS_ENDPOINT_URL, then run it again"
    return CloudError(what, where=where, why=why, next=then, code=type(error).__name__)


def _unanswered(where: str, error: Exception) -> CloudError:
    """Explains an error without a response: no credentials, no connection, invalid request."""
    import botocore.exceptions as known

    kind, why = type(error).__name__, _one_line(str(error))
    if isinstance(error, known.ParamValidationError):
        then = f"correct that value in config.yaml; {page('schema/README.md')} lists all keys"
        return CloudError("AWS rejects the request", where=where, why=why, next=then, code=kind)
    if kind.startswith(RENEWABLE):
        what = "your credentials have expired"
        return NotAsked(what, where=where, why=why, next=RENEW, code="ExpiredToken")
    lacking = (known.ProfileNotFound, known.SSOError, known.ConfigNotFound)
    if "Credential" in kind or isinstance(error, lacking):
        what = "no AWS credentials were found"
        return NotAsked(what, where=where, why=why, next=CREDENTIALS, code=kind)
    then = "check this machine's network and fleet.aws.region, then run it again"
    return NotAsked("AWS did not answer", where=where, why=why, next=then, code=kind)


def _words(answer: dict[str, Any], key: str) -> str:
    error = answer.get("Error")
    return _one_line(str(error.get(key, ""))) if isinstance(error, dict) else ""


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))[:MOST]
