"""Forwards a node's log to Amazon CloudWatch while its job runs.

TRAINFLEET_LOGS specifies the region and the log group, such as `us-east-1 /trainfleet/my-run`. If
it is set, the supervisor starts `python -m trainfleet.storage.cloudwatch LOG START` next to its
command. The forwarder polls the log for lines after byte START every EVERY seconds. When the
supervisor exits for any reason, the forwarder's stdin closes and it polls one last time. The log
stream is named after the log, such as `runs/x/node-0`.

The forwarder never kills the command, and delays the job's end by at most TO_END seconds. Verdicts
and reports read the log file, not CloudWatch. Failed requests are retried. If CloudWatch denies
access, the forwarder reports that once in the node's log and gives up.

Source of the request limits: CloudWatch Logs API reference, PutLogEvents (read 2026-11-22).
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..process.node_log import say
from ..run.records import size_of
from ..trust import untrusted_input
from ..trust.safe_output import install
from .s3_sync_agent import await_end

LOGS = "TRAINFLEET_LOGS"
FORWARDER = "logs"  # author of the forwarder's lines in the node's log
EVERY = 5.0  # seconds between two polls
TO_END = 20.0  # seconds for the last poll
ANSWER = 3.0  # connect and read timeout in seconds
# limits per request; CloudWatch counts 26 additional bytes per line
MOST_BYTES = 1_000_000
MOST_LINES = 10_000
BESIDE = 26
LONGEST = 256 * 1024 - BESIDE  # maximum line size in bytes
NEVER = (
    "AccessDeniedException",
    "ResourceNotFoundException",
    "InvalidParameterException",
    "UnrecognizedClientException",
)


@contextmanager
def forwarding(log: Path) -> Iterator[None]:
    """Forwards a node's log to CloudWatch inside the `with` block if TRAINFLEET_LOGS is set."""
    if LOGS not in os.environ:
        yield
        return
    words = [sys.executable, "-m", "trainfleet.storage.cloudwatch", str(log), str(size_of(log))]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(arguments: list[str]) -> int:
    """Runs the forwarder with the arguments LOG and START.

    Returns after the last poll, or once CloudWatch denies access.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the supervisor ends this process
    region, _, group = os.environ[LOGS].partition(" ")
    log = Path(arguments[0])
    sent = Forwarder(
        log,
        int(arguments[1]),
        _client(region),
        group,
        f"{'/'.join(log.parent.parent.parts[-2:])}/{log.stem}",
    )
    ended = threading.Event()
    threading.Thread(target=await_end, args=(ended,), daemon=True).start()
    while sent.look() and not ended.wait(EVERY):
        pass
    sent.look()
    return 0


class Forwarder:
    """Sends a log's lines to a log stream. Remembers where the next line starts."""

    def __init__(self, log: Path, start: int, client: Any, group: str, stream: str) -> None:
        self.log, self.start, self.client = log, start, client
        self.stream = {"logGroupName": group, "logStreamName": stream}
        self.made = self.closed = self.troubled = False

    def look(self) -> bool:
        """Sends new complete lines. Returns False once CloudWatch denies access."""
        from botocore.exceptions import BotoCoreError, ClientError

        if not self.log.exists():
            return True
        try:
            while not self.closed and (lines := self._lines()):
                self._send(lines)
                self.start += sum(map(len, lines))
                self.troubled = False
        except (ClientError, BotoCoreError, OSError) as error:
            code = error.response["Error"].get("Code", "") if isinstance(error, ClientError) else ""
            self.closed = code in NEVER
            if not self.troubled:
                goes = "giving up" if self.closed else "retrying"
                say(
                    self.log,
                    f"can't send this log to CloudWatch ({' '.join(str(error).split())}); {goes}",
                    FORWARDER,
                )
            self.troubled = True
        return not self.closed

    def _lines(self) -> list[bytes]:
        """Returns the next complete lines with their line endings, at most one request's worth."""
        with open(self.log, "rb", opener=untrusted_input.opener) as file:
            file.seek(self.start)
            content = file.read(MOST_BYTES)
        # The last line may be incomplete. It is sent anyway if it alone fills a request.
        whole = content.rfind(b"\n") + 1 or (len(content) if len(content) == MOST_BYTES else 0)
        lines = io.BytesIO(content[:whole]).readlines()
        size = count = 0
        for line in lines[:MOST_LINES]:
            size += min(len(line), LONGEST) + BESIDE
            if count and size > MOST_BYTES:
                break
            count += 1
        return lines[:count]

    def _send(self, lines: list[bytes]) -> None:
        if not self.made:
            with suppress(self.client.exceptions.ResourceAlreadyExistsException):
                self.client.create_log_stream(**self.stream)
            self.made = True
        now = int(time.time() * 1000)
        said = (line[:LONGEST].decode(errors="ignore").rstrip() for line in lines)
        if events := [{"timestamp": now, "message": text} for text in said if text]:
            self.client.put_log_events(**self.stream, logEvents=events)


def _client(region: str) -> Any:
    """Returns a CloudWatch Logs client that uses the node role's credentials."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "logs",
        region_name=region,
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 2},
            connect_timeout=ANSWER,
            read_timeout=ANSWER,
        ),
    )


if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
