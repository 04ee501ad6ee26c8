"""Reads the lines that CloudWatch Logs keeps of a container, from the end of the last read on.

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
# lines of the entrypoint already say who and when
OURS = re.compile(r"(rank \d+|\w+) +\d\d:\d\d:\d\d\.\d{3} \|")
PAGES = 64  # of one stream in one look: up to 10,000 lines or 1 MB each; the next look continues


def streams(calls: Calls, group: str, prefix: str) -> list[str]:
    """The names of a group's streams that begin so, by name; none while there is no such group."""
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
    """The lines behind `token`, each with its time of day, and the token behind them; CloudError
    where AWS refuses.
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
    """An event's lines as a node's log has its own: who, when, what."""
    stamp = int(event["timestamp"])
    clock = f"{time.strftime('%H:%M:%S', time.localtime(stamp // 1000))}.{stamp % 1000:03d}"
    for text in str(event["message"]).splitlines():
        yield text if OURS.match(text) else f"engine  {clock} | {text}"
