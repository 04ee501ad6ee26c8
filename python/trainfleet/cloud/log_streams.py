"""Reads a container's lines from CloudWatch Logs, starting where the last read ended.

A page may be empty without being the last; the last page returns the token that was sent. A group
or stream that does not exist yet has no lines.

Source: https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_GetLogEvents.html
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from ..trust.errors import CloudError
from .calls import Calls, Json, passing

ABSENT = "ResourceNotFoundException"
# lines of the entrypoint, which already have a source and a time
OURS = re.compile(r"(rank \d+|\w+) +\d\d:\d\d:\d\d\.\d{3} \|")
PAGES = 64  # most pages per read, each of up to 10,000 lines or 1 MB; the next read continues


def streams(calls: Calls, group: str, prefix: str) -> list[str]:
    """Returns the names of a group's streams with this prefix, sorted; empty without the group."""
    found: list[Json] = []
    with passing(ABSENT):
        named = {"logGroupName": group, "logStreamNamePrefix": prefix}
        found += calls.pages("logs", "DescribeLogStreams", "logStreams", **named)
    return sorted(str(stream["logStreamName"]) for stream in found)


def read(calls: Calls, group: str, stream: str, token: str = "") -> tuple[list[str], str]:
    """Returns the lines after `token`, with their time of day, and the next token. Raises
    CloudError if AWS refuses.
    """
    lines: list[str] = []
    where: Json = {"logGroupName": group, "logStreamName": stream, "startFromHead": True}
    for _ in range(PAGES):
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
    """Yields an event's lines in the format of a node's log: source, time, text."""
    stamp = int(event["timestamp"])
    clock = f"{time.strftime('%H:%M:%S', time.localtime(stamp // 1000))}.{stamp % 1000:03d}"
    for text in str(event["message"]).splitlines():
        yield text if OURS.match(text) else f"scheduler  {clock} | {text}"
