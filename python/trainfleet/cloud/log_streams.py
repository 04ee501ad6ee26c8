"""Reads the lines that CloudWatch Logs keeps of a container, from the end of the last read.

https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_GetLogEvents.html: a page
may be empty and not the last; it is the last when it gives back the token that was sent. A group or
a stream that is not there yet has no lines yet.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

from ..trust.errors import CloudError
from .api_errors import passing
from .calls import Calls

ABSENT = "ResourceNotFoundException"
# lines of the entrypoint already have a source and a time
OURS = re.compile(r"(rank \d+|\w+) +\d\d:\d\d:\d\d\.\d{3} \|")
PAGES = 64  # pages of one stream per read: up to 10,000 lines or 1 MB each; the next read continues


def streams(calls: Calls, group: str, prefix: str) -> list[str]:
    """Returns the names of a group's streams with this prefix, sorted; empty if the group does not
    exist.
    """
    found: list[dict[str, Any]] = []
    with passing(ABSENT):
        found += calls.pages(
            "logs",
            "DescribeLogStreams",
            "logStreams",
            logGroupName=group,
            logStreamNamePrefix=prefix,
        )
    return sorted(str(stream["logStreamName"]) for stream in found)


def read(calls: Calls, group: str, stream: str, token: str = "") -> tuple[list[str], str]:
    """Returns the lines after `token`, each with its time of day, and the token after them. Raises
    CloudError if AWS refuses.
    """
    lines: list[str] = []
    for _ in range(PAGES):
        where: dict[str, Any] = {
            "logGroupName": group,
            "logStreamName": stream,
            "startFromHead": True,
        }
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


def _lines(event: dict[str, Any]) -> Iterator[str]:
    """Yields an event's lines in the form of a node's log: source, time, text."""
    stamp = int(event["timestamp"])
    clock = f"{time.strftime('%H:%M:%S', time.localtime(stamp // 1000))}.{stamp % 1000:03d}"
    for text in str(event["message"]).splitlines():
        yield text if OURS.match(text) else f"scheduler  {clock} | {text}"
