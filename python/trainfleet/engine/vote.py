"""Makes all ranks stop or save at the same step as soon as any rank requests it.

Votes run in the background, so they do not delay steps.

One reason to stop is a spot interruption notice, which EC2 issues through the instance metadata
service two minutes before it reclaims an instance.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import FrameType

import torch

from .world import Tree

# Signals that request a stop: SIGTERM from Slurm, SageMaker and AWS Batch; SIGUSR1, Slurm's early
# warning; SIGINT from the terminal. Spot notices arrive through NoticePoller instead.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# default of AWS_EC2_METADATA_SERVICE_ENDPOINT, which AWS tools also read
SERVICE = "http://169.254.169.254"
EVERY = 5.0  # seconds between polls, as AWS recommends
PATIENCE = 2.0  # request timeout in seconds
LIFE = 60  # token lifetime in seconds; each poll requests a new token
# bypasses proxies, because the service is reachable only from the instance
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Decision:
    """A rank's requests after a step, or all ranks' requests combined."""

    stop: bool = False
    save: bool = False
    fail: bool = False


class Vote:
    """Takes a vote after every step, so that all ranks reach the same decision.

    Each call to `agreed` starts a sum over all ranks (world.Tree) and reads the result of the
    previous call's sum. That sum has usually arrived, because a step takes longer than a few
    messages. A request therefore takes effect one step after its vote.
    """

    def __init__(self, file: Path | None, tree: Tree) -> None:
        """Starts listening for stop signals.

        The rank also votes to stop once `file` exists. Pass None on ranks that should not check.
        """
        self.file = file
        self.tree = tree
        # whether this rank votes to stop: set by a signal, by the stop file or by the vote's owner
        self.heard = False
        self.votes = torch.zeros(3)
        self.under_way = False
        for number in SIGNALS:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True

    def agreed(self, proposal: Decision) -> Decision:
        """Starts this step's vote and returns the decision of the previous one."""
        decision = self.settle()
        self.heard = self.heard or (self.file is not None and self.file.exists())
        self.votes = torch.tensor([self.heard, proposal.save, proposal.fail], dtype=torch.float32)
        self.tree.begin(self.votes)
        self.under_way = True
        return decision

    def settle(self) -> Decision:
        """Waits for the vote in flight and returns its decision.

        If no vote is in flight, the decision is empty.
        """
        if not self.under_way:
            return Decision()
        self.tree.end()
        self.under_way = False
        return Decision(*(count > 0 for count in self.votes.tolist()))


class NoticePoller(threading.Thread):
    """Daemon thread that polls for a spot notice and passes it to `on_notice`.

    One per instance is enough.
    """

    def __init__(self, on_notice: Callable[[str], None]) -> None:
        super().__init__(name="spot", daemon=True)
        self.on_notice = on_notice
        self.trouble = ""
        self.start()

    def run(self) -> None:
        while True:
            try:
                if notice := look():
                    return self.on_notice(notice)
            except (OSError, HTTPException) as error:
                self.complain(str(error))
            time.sleep(EVERY)

    def complain(self, trouble: str) -> None:
        """Warns once that spot notices can't be read."""
        if not self.trouble:
            print(
                f"can't read spot notices from {service()}: {trouble}; with fleet.spot, this "
                "node may be reclaimed without warning"
            )
        self.trouble = trouble


def look() -> str:
    """Returns the spot notice, such as `terminate at 2026-11-20T08:22:00Z`, or "" if none was
    issued.

    Raises:
        OSError, HTTPException: the metadata service did not respond, or its response was invalid.
    """
    token = ask("/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": str(LIFE)})
    try:
        text = ask(
            "/latest/meta-data/spot/instance-action", "GET", {"X-aws-ec2-metadata-token": token}
        )
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ""
        raise
    try:
        notice = json.loads(text)
        return f"{notice['action']} at {notice['time']}"
    except (ValueError, KeyError, TypeError):
        return text  # a notice counts even if its format is unknown


def ask(path: str, method: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(service() + path, headers=headers, method=method)
    with DIRECT.open(request, timeout=PATIENCE) as answer:
        return str(answer.read().decode(errors="replace"))


def service() -> str:
    return os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", SERVICE).rstrip("/")
