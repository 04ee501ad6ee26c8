"""Logs in CloudWatch: every line once and in order, whatever CloudWatch does; and a command that never waits or fails for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError

import trainfleet
from s3server import serve
from trainfleet.storage.cloudwatch import BESIDE, LOGS, LONGEST, MOST_LINES, Forwarder
from trainfleet.watch.lines import parse

GROUP, STREAM = "/trainfleet/cloudy", "runs/x/node-0"
PLACE = {"logGroupName": GROUP, "logStreamName": STREAM}
WORDS = "import sys, time; print('one', flush=True); time.sleep(0.1); print('two'); sys.exit(3)"


@pytest.fixture
def client() -> Iterator[Any]:
    """CloudWatch's, with the log group."""
    with serve(lambda application: application):
        made = boto3.client("logs")
        made.create_log_group(logGroupName=GROUP)
        yield made
        made.delete_log_group(logGroupName=GROUP)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "runs/x/logs/node-0.log"
    path.parent.mkdir(parents=True)
    return path


def sent(client: Any) -> list[str]:
    answer = client.get_log_events(**PLACE, startFromHead=True, limit=10_000)
    return [event["message"] for event in answer["events"]]


def supervise(log: Path, group: str) -> int:
    words = [
        sys.executable,
        "-m",
        "trainfleet.node.supervisor",
        str(log),
        "--",
        sys.executable,
        "-c",
        WORDS,
    ]
    environment = os.environ | {
        "PYTHONPATH": str(Path(trainfleet.__file__).parents[1]),
        LOGS: f"us-east-1 {group}",
    }
    return subprocess.run(words, env=environment, timeout=60, check=False).returncode


def test_what_a_node_logs_is_in_cloudwatch_and_what_stood_there_before_is_not(
    client: Any, log: Path
) -> None:
    log.write_text("of an attempt before\n")
    assert supervise(log, GROUP) == 3, "the command's own exit code"
    assert sent(client) == log.read_text().splitlines()[1:] and len(sent(client)) == 2


def test_a_group_that_is_not_there_is_said_once_and_ends_nothing(client: Any, log: Path) -> None:
    assert supervise(log, "/another") == 3
    lines = log.read_text().splitlines()
    assert (
        len(lines) == 3 and sum("can't send this log to CloudWatch" in line for line in lines) == 1
    ), lines
    assert [line.text for line in parse(lines, 0)] == ["one", "two"], (
        "a verdict looks for no cause in it"
    )


class Away:
    """A client whose requests, from one to another, find no way to CloudWatch; the others are noted."""

    def __init__(self, client: Any, lost: range = range(0)) -> None:
        self.client, self.lost, self.asked, self.requests = (
            client,
            lost,
            0,
            list[list[dict[str, Any]]](),
        )
        self.exceptions = client.exceptions

    def create_log_stream(self, **words: Any) -> None:
        self.client.create_log_stream(**words)

    def put_log_events(self, **words: Any) -> None:
        self.asked += 1
        if self.asked - 1 in self.lost:
            raise EndpointConnectionError(endpoint_url="https://logs")
        self.requests.append(words["logEvents"])
        self.client.put_log_events(**words)


def test_while_cloudwatch_is_away_lines_wait_and_none_is_lost(client: Any, log: Path) -> None:
    away = Away(client, range(1, 3))
    said = Forwarder(log, 0, away, GROUP, STREAM)
    assert said.look(), "no log yet"
    for number in range(5):
        with open(log, "a") as file:
            file.write(f"line {number}\n")
        assert said.look()
    lines = log.read_text().splitlines()
    assert sent(client) == lines and [line for line in lines if "retrying" in line], lines
    assert len(lines) == 6, "one note for one outage"


def test_long_lines_many_lines_and_half_a_line(client: Any, log: Path) -> None:
    lines = [f"{number}" for number in range(MOST_LINES + 5)] + [
        "x" * (LONGEST + 9),
        "",
        "é" * 900_000,
        "last",
    ]
    log.write_text("\n".join(lines) + "\nhal")
    away = Away(client)
    said = Forwarder(log, 0, away, GROUP, STREAM)
    assert said.look()
    found = [event["message"] for request in away.requests for event in request]
    assert (
        found[: MOST_LINES + 5] == lines[: MOST_LINES + 5]
        and found[-1] == "last"
        and "hal" not in found
    )
    assert "x" * LONGEST in found and "".join(found).count("é") >= LONGEST // 2
    for request in away.requests:
        assert (
            len(request) <= MOST_LINES
            and sum(len(event["message"].encode()) + BESIDE for event in request) <= 1_048_576
        )
    with open(log, "a") as file:
        file.write("f\n")
    said.look()
    assert away.requests[-1][-1]["message"] == "half"
