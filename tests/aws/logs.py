"""CloudWatch Logs in the pretended account: what the schedulers' containers have printed, a stream each, in pages as the service gives them.

A page has PAGE lines at most; the one behind the last is empty and gives back the token that was sent. A group that nothing was
written to is not there.
"""

from __future__ import annotations

from typing import Any

from .account import Account, Refused, answers
from .containers import Container

PAGE = 5


def written(account: Account, group: str) -> dict[str, Container]:
    """The containers of a group, by their streams."""
    service = getattr(account, "batch", None) or getattr(account, "sagemaker", None)
    every = service.containers.all.values() if service and service.containers else ()
    found = {one.stream: one for one in every if one.group == group and one.stream}
    if not found:
        raise Refused("ResourceNotFoundException", "The specified log group does not exist.")
    return found


@answers("logs", "DescribeLogStreams")
def _streams(
    account: Account, logGroupName: str, logStreamNamePrefix: str = "", **_: Any
) -> dict[str, Any]:
    kept = [
        thing.id for thing in account.of("log-stream") if thing.properties["group"] == logGroupName
    ]
    names = sorted(
        name
        for name in (kept or written(account, logGroupName))
        if name.startswith(logStreamNamePrefix)
    )
    return {"logStreams": [{"logStreamName": name} for name in names]}


@answers("logs", "DeleteLogStream")
def _delete(account: Account, logGroupName: str, logStreamName: str) -> dict[str, Any]:
    if account.things.pop(logStreamName, None) is None:
        written(account, logGroupName)[logStreamName].stream = ""
    return {}


@answers("logs", "GetLogEvents")
def _events(
    account: Account,
    logGroupName: str,
    logStreamName: str,
    startFromHead: bool,
    nextToken: str = "f/0",
) -> dict[str, Any]:
    assert startFromHead, "else the token means nothing"
    container = written(account, logGroupName).get(logStreamName)
    if container is None:
        raise Refused("ResourceNotFoundException", "The specified log stream does not exist.")
    first = int(nextToken.removeprefix("f/"))
    lines = container.lines()[first : first + PAGE]
    stamp = int(container.began * 1000)
    events = [
        {"timestamp": stamp + number, "ingestionTime": stamp, "message": line}
        for number, line in enumerate(lines, first)
    ]
    return {
        "events": events,
        "nextForwardToken": f"f/{first + len(lines)}",
        "nextBackwardToken": "b/0",
    }
