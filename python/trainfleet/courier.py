"""A node's courier: while a job runs, the lines of the node's log go to Amazon CloudWatch too.

TRAINFLEET_LOGS names the place, `us-east-1 /trainfleet/my-run`: region and log group. The supervisor then has a
`python -m trainfleet.courier LOG START` beside its command. It looks every EVERY seconds for what stands behind byte START, and
once more when its stdin ends: when the supervisor ends, however it does. The stream is named as the log, `runs/x/node-0`.

Nothing here ends the command, or keeps it waiting for more than TO_END: verdicts and reports read the log itself. What can't be
sent yet is tried again; what may not be is given up, and the node's log says so once.

Limits of a request and its size, by which this cuts: CloudWatch Logs' API reference, PutLogEvents (read 2026-11-22).
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

from .output import install
from .uplink import await_end, say

LOGS = "TRAINFLEET_LOGS"
COURIER = "logs"  # who writes its own words into a log
EVERY = 5.0  # seconds between two looks
TO_END = 20.0  # seconds that the last look gets
ANSWER = 3.0  # seconds for CloudWatch to answer
MOST_BYTES, MOST_LINES, BESIDE = 1_000_000, 10_000, 26  # of a request: a line counts so many bytes more than it has
LONGEST = 256 * 1024 - BESIDE  # bytes of a line
NEVER = ("AccessDeniedException", "ResourceNotFoundException", "InvalidParameterException", "UnrecognizedClientException")


@contextmanager
def courier(log: Path) -> Iterator[None]:
    """What sends a node's log to CloudWatch, where its job says so; else nothing."""
    if LOGS not in os.environ:
        yield
        return
    begins = log.stat().st_size if log.exists() else 0
    process = subprocess.Popen([sys.executable, "-m", "trainfleet.courier", str(log), str(begins)], stdin=subprocess.PIPE,
                               start_new_session=True)  # fmt: skip
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
    """`LOG START`: returns after the last look, or once CloudWatch has said that it takes nothing from here."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor decides when this ends
    region, _, group = os.environ[LOGS].partition(" ")
    log = Path(arguments[0])
    sent = Courier(log, int(arguments[1]), _client(region), group, f"{'/'.join(log.parent.parent.parts[-2:])}/{log.stem}")
    ended = threading.Event()
    threading.Thread(target=await_end, args=(ended,), daemon=True).start()
    while sent.look() and not ended.wait(EVERY):
        pass
    sent.look()
    return 0


class Courier:
    """Where in a log the sending is, and the stream that it goes to."""

    def __init__(self, log: Path, start: int, client: Any, group: str, stream: str) -> None:
        self.log, self.start, self.client = log, start, client
        self.place = {"logGroupName": group, "logStreamName": stream}
        self.made = self.closed = self.troubled = False

    def look(self) -> bool:
        """Sends whole lines that have come since; False once nothing is taken from here."""
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
                goes = "this log is not sent there" if self.closed else "it is tried again"
                say(self.log, f"CloudWatch takes no lines ({' '.join(str(error).split())}); {goes}", COURIER)
            self.troubled = True
        return not self.closed

    def _lines(self) -> list[bytes]:
        """The next lines, each with its end, as many as one request takes; none where no line is whole yet."""
        with open(self.log, "rb") as file:
            file.seek(self.start)
            content = file.read(MOST_BYTES)
        whole = content.rfind(b"\n") + 1 or (len(content) if len(content) == MOST_BYTES else 0)  # the last is still being written
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
                self.client.create_log_stream(**self.place)
            self.made = True
        now = int(time.time() * 1000)
        said = (line[:LONGEST].decode(errors="ignore").rstrip() for line in lines)
        if events := [{"timestamp": now, "message": text} for text in said if text]:
            self.client.put_log_events(**self.place, logEvents=events)


def _client(region: str) -> Any:
    """With the credentials of the node's own role."""
    import boto3
    from botocore.config import Config

    wait = {"connect_timeout": ANSWER, "read_timeout": ANSWER}
    return boto3.client("logs", region_name=region, config=Config(retries={"mode": "standard", "total_max_attempts": 2}, **wait))


if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
