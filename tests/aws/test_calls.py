"""The entry of AWS requests: what no service takes is refused before it is sent, and each refusal says what to do."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from typing import Any

import boto3
import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    ProfileNotFound,
    UnauthorizedSSOTokenError,
)

from aws import validation
from trainfleet.cloud import calls
from trainfleet.cloud.calls import Calls
from trainfleet.trust.errors import CloudError
from verbs import PACKAGES

ACCESS = "You are not authorized to perform this operation. User: arn:aws:iam::123456789012:user/x is not authorized to perform: "


def refused(code: str, message: str = "no") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "X")


def answering(
    monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any] | Exception
) -> list[tuple[str, str, str, dict[str, Any]]]:
    """The requests that were carried, each answered by the next of `answers`."""
    sent: list[tuple[str, str, str, dict[str, Any]]] = []

    def send(region: str, service: str, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        sent.append((region, service, operation, dict(request)))
        answer = answers[len(sent) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(calls, "send", send)
    return sent


def test_a_request_is_carried_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = answering(monkeypatch, {"Vpcs": []})
    assert Calls("us-east-1")("ec2", "DescribeVpcs", VpcIds=["vpc-1"]) == {"Vpcs": []}
    assert sent == [("us-east-1", "ec2", "DescribeVpcs", {"VpcIds": ["vpc-1"]})]


@pytest.mark.parametrize(
    ("service", "operation", "request_", "said"),
    [
        ("ec2", "DescribeVpcs", {"VpcIds": "vpc-1"}, "Invalid type for parameter VpcIds"),
        ("ec2", "CreateTags", {"Resources": []}, 'Missing required parameter in input: "Tags"'),
        ("ec2", "DescribeVpcs", {"Vpcs": []}, 'Unknown parameter in input: "Vpcs"'),
        (
            "fsx",
            "DeleteFileSystem",
            {"FileSystemId": "fs-xyz"},
            ".FileSystemId: 'fs-xyz' does not match",
        ),
        (
            "fsx",
            "CreateFileSystem",
            {"FileSystemType": "LUSTER", "SubnetIds": []},
            "'LUSTER' is not one of",
        ),
        ("cloudformation", "ExecuteChangeSet", {"ChangeSetName": ""}, "0 characters, at least 1"),
        ("ec2", "DescribeInstances", {"MaxResults": "5"}, "Invalid type"),
        (
            "service-quotas",
            "RequestServiceQuotaIncrease",
            {"ServiceCode": "ec2", "QuotaCode": "L-1", "DesiredValue": 10**11},
            "at most",
        ),
    ],
)
def test_what_no_service_takes_is_not_sent(
    service: str,
    operation: str,
    request_: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = answering(monkeypatch)
    with pytest.raises(CloudError, match="AWS rejects the request") as caught:
        Calls("us-east-1")(service, operation, **request_)
    assert said in caught.value.why and not sent


@pytest.mark.parametrize(
    ("error", "what", "next"),
    [
        (
            refused("UnauthorizedOperation", f"{ACCESS}ec2:RunInstances on resource: x"),
            "may not do ec2:RunInstances",
            "AWS_PROFILE",
        ),
        (refused("AccessDeniedException"), "may not do tag:GetResources", "AWS_PROFILE"),
        (refused("ExpiredToken"), "have expired", "aws sso login"),
        (refused("AuthFailure"), "does not know your credentials", "aws sts get-caller-identity"),
        (refused("RequestLimitExceeded"), "throttling", "wait a minute"),
        (refused("OptInRequired"), "in this region", "fleet.aws.region"),
        (
            refused("InsufficientInstanceCapacity"),
            "no capacity for this instance type",
            "fleet.aws.zones",
        ),
        (
            refused("Whatever", "strange\x1b[2J\nwords"),
            "AWS refuses GetResources",
            "the same command again",
        ),
        (NoCredentialsError(), "no AWS credentials were found", "AWS_PROFILE"),
        (ProfileNotFound(profile="x"), "no AWS credentials were found", "AWS_PROFILE"),
        (UnauthorizedSSOTokenError(), "have expired", "aws sso login"),
        (EndpointConnectionError(endpoint_url="https://x"), "did not answer", "network"),
    ],
)
def test_each_refusal_says_why_and_what_to_type(
    error: Exception, what: str, next: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, error)
    with pytest.raises(CloudError) as caught:
        Calls("us-east-1")("resourcegroupstaggingapi", "GetResources")
    assert (
        what in caught.value.what and next in caught.value.next and "\x1b" not in str(caught.value)
    )
    assert caught.value.where == "resourcegroupstaggingapi GetResources in us-east-1"


@pytest.mark.parametrize("status", [200, 403, 502])
def test_a_page_of_a_proxy_is_told_as_one(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(b"<html><body>Sign in to the network</body></html>")

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_ACCESS_KEY_ID": "x",
                        "AWS_SECRET_ACCESS_KEY": "y", "AWS_MAX_ATTEMPTS": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    calls._client.cache_clear()
    try:
        for service, operation in (
            ("sts", "GetCallerIdentity"),
            ("ecr", "GetAuthorizationToken"),
            ("batch", "DescribeJobQueues"),
        ):
            with pytest.raises(CloudError) as caught:
                Calls("us-east-1")(service, operation)
            assert status != 200 or "HTTPS_PROXY" in caught.value.next, (service, caught.value)
    finally:
        calls._client.cache_clear()
        server.shutdown()
        server.server_close()


def test_a_defect_of_ours_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, KeyError("x"))
    with pytest.raises(KeyError):
        Calls("us-east-1")("ec2", "DescribeVpcs")


def test_pages_follow_each_other_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = answering(
        monkeypatch,
        {"Reservations": [1], "NextToken": "a"},
        {"NextToken": "b"},
        {"Reservations": [2], "NextToken": ""},
    )
    assert list(
        Calls("us-east-1").pages("ec2", "DescribeInstances", "Reservations", MaxResults=5)
    ) == [1, 2]
    assert [request.get("NextToken") for *_, request in sent] == [None, "a", "b"] and all(
        request["MaxResults"] == 5 for *_, request in sent
    )


def test_a_listing_that_botocore_does_not_page_is_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering(monkeypatch, {"Associations": [1], "NextToken": "YWJj"}, {"Associations": [2]})
    found = Calls("us-east-1").pages("fsx", "DescribeDataRepositoryAssociations", "Associations")
    assert list(found) == [1, 2]


def test_a_listing_that_repeats_itself_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, *[{"Reservations": [1], "NextToken": "a"}] * 3)
    assert list(Calls("us-east-1").pages("ec2", "DescribeInstances", "Reservations")) == [1, 1]


def test_models_patterns_are_said_in_python() -> None:
    tags = validation.translate(r"^([\p{L}\p{Z}\p{N}_.:/=+\-@]*)$")
    assert tags and tags.fullmatch("trainfleet:naïve name=1") and not tags.fullmatch("a#b")
    assert validation.problems_of("ec2", "DescribeVpcs", {}) == []


def test_most_patterns_of_the_services_in_use_can_be_checked() -> None:
    import botocore.session

    unsaid, all_ = set(), set()
    for service in (
        "cloudformation",
        "ec2",
        "fsx",
        "service-quotas",
        "pricing",
        "ssm",
        "logs",
        "ecr",
        "iam",
        "batch",
        "sagemaker",
    ):
        model = botocore.session.get_session().get_service_model(service)
        for name in model.shape_names:
            if pattern := model.shape_for(name).metadata.get("pattern"):
                all_.add(pattern)
                unsaid |= {pattern} if validation.translate(pattern) is None else set()
    assert (
        len(all_) > 300 and len(unsaid) <= 3
    )  # a tag's `${1,128}`, and letters above the first plane: nobody's


BAD = """
import boto3, botocore.exceptions
client = boto3.client("s3", "us-east-1", aws_access_key_id="x", aws_secret_access_key="x", endpoint_url="http://127.0.0.1:9")
client.put_object(Bucket="bucket", Key="key", ACL="everybody")
"""


def test_every_process_of_the_test_suite_refuses_what_no_service_takes() -> None:
    """In this one, where tests/conftest.py has put the check, and in those that tests start (tests/strict)."""
    client = boto3.client(
        "s3",
        "us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
        endpoint_url="http://127.0.0.1:9",
    )
    with pytest.raises(ParamValidationError, match="'everybody' is not one of"):
        client.put_object(Bucket="bucket", Key="key", ACL="everybody")
    ran = subprocess.run(
        [sys.executable, "-c", BAD],
        env=os.environ | {"PYTHONPATH": PACKAGES},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1 and "'everybody' is not one of" in ran.stderr, ran.stderr
