"""Sends control requests to AWS. Validates them against botocore's service models, and converts
botocore's errors to CloudErrors that state the cause and the next step.

Also reads a container's log lines from CloudWatch Logs, resuming where the last read ended. A page
of log events may be empty without being the last one; the last page returns the token that was
sent. A group or stream that does not exist yet has no lines. Source:
https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_GetLogEvents.html

`send` is a hook that test fakes and the crash matrix replace. Requests for S3 objects are in
storage/s3.py, because nodes send them too. boto3 is imported on the first request.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.tables import read_table
from ..process.install_paths import page
from ..trust.errors import CloudError, ConfigError, NotAsked
from ..trust.safe_output import visible
from ..trust.secrets import is_keyless

# Attempts per request in boto3's standard mode, which waits up to 20 s between attempts while AWS
# throttles.
TRIES = 8
SECONDS = 30  # read timeout
# requests that are never retried, because each one costs money
ONCE = ("PurchaseCapacityBlock", "CreateTrainingPlan")
PAGES = 10_000  # maximum pages per listing, because a faulty server might never end it

Json = dict[str, Any]  # request, response, or part of a template
Row = Mapping[str, Any]  # one entry of a response
Send = Callable[[str, str, str, Json], Json]


def by_boto3(region: str, service: str, operation: str, request: Json) -> Json:
    """Sends a request with boto3 and returns the response. Raises botocore's errors, or NotAws."""
    from botocore import xform_name

    with _LOCK:  # clients are thread-safe, but creating them is not
        client = _client(region, service, 1 if operation in ONCE else TRIES)
    answer: Json = getattr(client, xform_name(operation))(**request)
    if "html" in answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("content-type", ""):
        # for some services, botocore parses a web page as an empty response
        raise NotAws(f"{operation} was answered with a page")
    return answer


send: Send = by_boto3
_LOCK = threading.Lock()


class Calls:
    """Client for the services in one region: `calls("ec2", "DescribeVpcs", Filters=[...])`.

    Operations have their AWS names, as in botocore's models.
    """

    def __init__(self, region: str) -> None:
        self.region = region

    def __call__(self, service: str, operation: str, **request: Any) -> Json:
        """Sends the request and returns the response.

        Raises:
            CloudError: the request is invalid, or AWS refused it or did not respond. `code` is
                AWS's error code.
        """
        if send is by_boto3 and is_keyless():
            where = f"{service} {operation} in {self.region}"
            raise NotAsked(KEYLESS, where=where, next=CREDENTIALS, code="NoCredentialsError")
        with explained(self.region, service, operation):
            require_valid(service, operation, request)
            return send(self.region, service, operation, request)

    def pages(self, service: str, operation: str, key: str, **request: Any) -> Iterator[Any]:
        """Yields the entries under `key` from all pages. Raises CloudError, as a single call
        does.
        """
        seen: set[str] = set()
        for _ in range(PAGES):
            answer = self(service, operation, **request)
            yield from answer.get(key) or ()
            pairs = _tokens(service, operation)
            following = {name: answer[token] for name, token in pairs if answer.get(token)}
            if not following or str(following) in seen:
                return
            seen.add(str(following))
            request |= following
        what, where = f"{operation} has more than {PAGES:,} pages", f"{service} in {self.region}"
        raise CloudError(what, where=where, next="run the same command again")


def require_valid(service: str, operation: str, request: Json) -> None:
    """Raises a ParamValidationError listing every violation of botocore's service model."""
    from botocore.exceptions import ParamValidationError
    from botocore.validate import ParamValidator

    shape = _model(service).operation_model(operation).input_shape
    if shape is None:
        return
    report = ParamValidator().validate(request, shape)
    if report.has_errors():
        raise ParamValidationError(report=report.generate_report())


@functools.cache
def _session() -> Any:
    import botocore.session

    return botocore.session.get_session()


@functools.cache
def _model(service: str) -> Any:
    return _session().get_service_model(service)


@functools.cache
def _client(region: str, service: str, tries: int) -> Any:
    """Returns a client with boto3's credentials. Threads may share it."""
    import boto3
    from botocore.config import Config

    wait = {"connect_timeout": 10, "read_timeout": SECONDS}
    config = Config(retries={"mode": "standard", "total_max_attempts": tries}, **wait)
    return boto3.client(service, region_name=region, config=config)


@functools.cache
def _tokens(service: str, operation: str) -> tuple[tuple[str, str], ...]:
    """Returns the pagination tokens: pairs of a request parameter and the key of its value in the
    previous response. Empty if the operation is not paginated.
    """
    from botocore.exceptions import UnknownServiceError
    from botocore.paginate import PaginatorModel

    loader = _session().get_component("data_loader")
    try:
        model = PaginatorModel(loader.load_service_model(service, "paginators-1"))
        pagination = model.get_paginator(operation)
    except (UnknownServiceError, ValueError):
        shape, token = _model(service).operation_model(operation).output_shape, "NextToken"
        return ((token, token),) if shape and token in shape.members else ()
    into, out = pagination["input_token"], pagination["output_token"]
    return ((into, out),) if isinstance(into, str) else tuple(zip(into, out, strict=True))


PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}  # region name prefix → partition


def region_of(config: Config) -> str:
    """Returns the first of fleet.aws.region, AWS_REGION, AWS_DEFAULT_REGION and the profile's
    region that is set. Raises ConfigError if none is set.
    """
    if config.fleet.aws.region:
        return config.fleet.aws.region
    import botocore.exceptions
    import botocore.session

    session, key = botocore.session.get_session(), "fleet.aws.region"
    try:
        found = os.environ.get("AWS_REGION") or session.get_config_variable("region")
    except botocore.exceptions.BotoCoreError as error:  # missing profile or unreadable file
        then = "check AWS_PROFILE and ~/.aws/config"
        raise ConfigError.of(key, str(error), next=then) from error
    if not found:
        message = "null, and neither AWS_REGION, AWS_DEFAULT_REGION nor your profile names a region"
        then = "add SET='fleet.aws.region=us-east-1', or set fleet.aws.region in config.yaml"
        raise ConfigError.of(key, message, next=then)
    return str(found)


def through_agent(region: str) -> str:
    """Returns an ssh_config ProxyCommand that reaches the instance %h through SSM."""
    document = "--document-name AWS-StartSSHSession --parameters portNumber=%p"
    return f"aws ssm start-session --target %h {document} --region {region}"


def partition_of(region: str) -> str:
    """Returns the region's AWS partition, which is part of every ARN."""
    return next((name for start, name in PARTITIONS.items() if region.startswith(start)), "aws")


REFUSALS = read_table(Path(__file__).with_name("error_codes.yaml"))
CODES = {meaning: frozenset(row["codes"]) for meaning, row in REFUSALS.items()}
DENIED = CODES["denied"]
KEYLESS = "no AWS credentials were found"
CREDENTIALS, RENEW = (REFUSALS[meaning]["next"] for meaning in ("unknown key", "expired"))
# services and actions that IAM names differently from botocore
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
# name prefixes of botocore errors that mean expired credentials
RENEWABLE = ("UnauthorizedSSO", "SSOToken", "TokenRetrieval", "LoginRefresh", "LoginToken")
MOST = 600  # maximum characters quoted from AWS's message


def action(service: str, operation: str) -> str:
    """Returns the IAM action of an operation, such as `ec2:RunInstances`."""
    name = f"{PREFIXES.get(service, service)}:{operation}"
    return ACTIONS.get(name, name)


class NotAws(ValueError):
    """Raised if the response is a web page, such as a proxy's, instead of AWS's response."""


@contextmanager
def explained(region: str, service: str, operation: str) -> Iterator[None]:
    """Converts botocore's errors to CloudErrors."""
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
    """Suppresses CloudErrors with one of these codes."""
    try:
        yield
    except CloudError as error:
        if error.code not in codes:
            raise


def _refused(where: str, service: str, operation: str, answer: Json) -> CloudError:
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
    """Returns whether botocore failed to parse the response, as it does with web pages."""
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
    """Explains why a request got no response: credentials, connection, or invalid parameters."""
    import botocore.exceptions as known

    kind, why = type(error).__name__, _one_line(str(error))
    if isinstance(error, known.ParamValidationError):
        then = f"fix that value in config.yaml; {page('schema/README.md')} lists all keys"
        return CloudError("AWS rejects the request", where=where, why=why, next=then, code=kind)
    if kind.startswith(RENEWABLE):
        what = "your credentials have expired"
        return NotAsked(what, where=where, why=why, next=RENEW, code="ExpiredToken")
    lacking = (known.ProfileNotFound, known.SSOError, known.ConfigNotFound)
    if "Credential" in kind or isinstance(error, lacking):
        return NotAsked(KEYLESS, where=where, why=why, next=CREDENTIALS, code=kind)
    then = "check this machine's network and fleet.aws.region, then run it again"
    return NotAsked("AWS did not answer", where=where, why=why, next=then, code=kind)


def _words(answer: Json, key: str) -> str:
    error = answer.get("Error")
    return _one_line(str(error.get(key, ""))) if isinstance(error, dict) else ""


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))[:MOST]


ABSENT = "ResourceNotFoundException"
# lines from the entry point, which already start with a source and a time
OURS = re.compile(r"(rank \d+|\w+) +\d\d:\d\d:\d\d\.\d{3} \|")
LOG_PAGES = 64  # maximum pages per read, each up to 10,000 lines or 1 MB; the next read continues


def log_streams(calls: Calls, group: str, prefix: str) -> list[str]:
    """Returns the names of the group's streams with this prefix, sorted. Empty if there is no
    group.
    """
    found: list[Json] = []
    with passing(ABSENT):
        named = {"logGroupName": group, "logStreamNamePrefix": prefix}
        found += calls.pages("logs", "DescribeLogStreams", "logStreams", **named)
    return sorted(str(stream["logStreamName"]) for stream in found)


def read_log(calls: Calls, group: str, stream: str, token: str = "") -> tuple[list[str], str]:
    """Returns the log lines after `token`, with their time of day, and the next token. Raises
    CloudError if AWS refuses.
    """
    lines: list[str] = []
    where: Json = {"logGroupName": group, "logStreamName": stream, "startFromHead": True}
    for _ in range(LOG_PAGES):
        try:
            answer = calls(
                "logs", "GetLogEvents", **where, **({"nextToken": token} if token else {})
            )
        except CloudError as error:
            if error.code == ABSENT:
                break
            raise
        lines += (line for event in answer.get("events", ()) for line in _lines(event))
        before, token = token, str(answer["nextForwardToken"])
        if token == before:
            break
    return lines, token


def _lines(event: Json) -> Iterator[str]:
    """Yields an event's lines in the node log format: source, time, text."""
    stamp = int(event["timestamp"])
    clock = f"{time.strftime('%H:%M:%S', time.localtime(stamp // 1000))}.{stamp % 1000:03d}"
    for text in str(event["message"]).splitlines():
        yield text if OURS.match(text) else f"scheduler  {clock} | {text}"
