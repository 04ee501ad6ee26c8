"""What an engine alone has heard of a node comes to the run folder, and what the node has said itself is enough where it has."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from s3server import serve
from trainfleet.backends.aws_managed import PATIENCE, Console, Consoles
from trainfleet.cloud import calls
from trainfleet.cloud.calls import Calls
from trainfleet.storage import s3
from trainfleet.trust.errors import CloudError

ROOT = "s3://bucket/some/runs/x"
FOLDER = Path("runs/x")


class Logs:
    """CloudWatch Logs with these streams, whose pages have two lines."""

    def __init__(self, **kept: list[str]) -> None:
        self.kept, self.sent, self.denied = kept, list[dict[str, Any]](), False

    def __call__(
        self, region: str, service: str, operation: str, request: dict[str, Any]
    ) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        assert (service, operation) == ("logs", "GetLogEvents")
        self.sent.append(request)
        if self.denied:
            raise ClientError(
                {"Error": {"Code": "AccessDeniedException", "Message": "no"}}, operation
            )
        if request["logStreamName"] not in self.kept:
            raise ClientError(
                {"Error": {"Code": "ResourceNotFoundException", "Message": "no"}}, operation
            )
        first = int(request.get("nextToken", "f/0")[2:])
        found = self.kept[request["logStreamName"]][first : first + 2]
        events = [{"timestamp": 1_790_000_000_123, "message": line} for line in found]
        return {"events": events, "nextForwardToken": f"f/{first + len(found)}"}


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Logs]:
    monkeypatch.chdir(tmp_path)
    found = Logs(zero=["exec /usr/bin/python3: exec format error"])
    monkeypatch.setattr(calls, "send", found)
    with serve(lambda application: application):
        yield found


def console(ended: bool = True, began: float | None = None) -> Console:
    return Console(
        time.time() - 5 if began is None else began, ended, "/aws/batch/job", {0: "zero", 1: "one"}
    )


def bring(found: Console | None, consoles: Consoles | None = None) -> Consoles:
    consoles = consoles or Consoles(Calls("us-east-1"))
    consoles.bring(found, FOLDER, ROOT)
    return consoles


def read(node: int) -> list[str]:
    log = FOLDER / f"logs/engine-{node}.log"
    return (
        [line.partition(" | ")[2] for line in log.read_text().splitlines()] if log.exists() else []
    )


def test_a_container_that_died_before_the_entrypoint_is_heard(logs: Logs) -> None:
    bring(console())
    assert read(0) == ["exec /usr/bin/python3: exec format error"] and read(1) == []
    assert logs.sent[0] == {
        "logGroupName": "/aws/batch/job",
        "logStreamName": "zero",
        "startFromHead": True,
    }
    assert logs.sent[1]["nextToken"] == "f/1", "a page that gives back its token is the last"


def test_what_comes_later_is_added_page_by_page(logs: Logs) -> None:
    consoles = bring(console())
    logs.kept["zero"] += [f"line {number}" for number in range(5)]
    logs.kept["one"] = ["at last"]
    bring(console(), consoles)
    assert read(0) == [
        "exec /usr/bin/python3: exec format error",
        *(f"line {number}" for number in range(5)),
    ]
    assert read(1) == ["at last"]
    bring(console(), Consoles(Calls("us-east-1")))
    assert len(read(0)) == 6, "another process begins anew"


def test_a_node_that_spoke_in_this_attempt_is_not_asked_after(logs: Logs) -> None:
    bring(console())
    s3.write(f"{ROOT}/logs/node-0.log/1-00000000", b"agent   00:00:00.000 | here\n")
    bring(console())
    assert not (FOLDER / "logs/engine-0.log").exists(), (
        "and what was heard of it before is in its own log"
    )
    assert {request["logStreamName"] for request in logs.sent[2:]} == {"one"}
    bring(console(began=time.time() + 60))
    assert read(0), "what it said in an earlier attempt does not count"


def test_a_container_is_given_time_to_begin(logs: Logs) -> None:
    bring(console(ended=False))
    bring(None)
    assert not logs.sent
    bring(console(ended=False, began=time.time() - PATIENCE - 5))
    assert read(0)


def test_who_may_not_read_is_told_so(logs: Logs) -> None:
    logs.denied = True
    with pytest.raises(CloudError, match="your credentials may not do logs:GetLogEvents"):
        bring(console())


def test_a_scheduler_s_lines_have_their_time_and_ours_keep_their_own(logs: Logs) -> None:
    logs.kept["zero"] = ["two\nlines", "rank 3  07:01:02.345 | step 1"]
    found, token = calls.read_log(Calls("us-east-1"), "g", "zero")
    clock = time.strftime("%H:%M:%S", time.localtime(1_790_000_000))
    assert found == [
        f"scheduler  {clock}.123 | two",
        f"scheduler  {clock}.123 | lines",
        "rank 3  07:01:02.345 | step 1",
    ]
    assert token == "f/2" and calls.read_log(Calls("us-east-1"), "g", "zero", token) == (
        [],
        "f/2",
    )
