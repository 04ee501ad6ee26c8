"""Votes: all ranks do at the same step what one rank requests (a stop, a save), without delaying
any step.

A reason to stop is EC2's notice, two minutes ahead, that a spot instance will be reclaimed; the
instance's metadata service is polled for it.
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

# A scheduler's notice (Slurm, SageMaker, Batch), the terminal's, and Slurm's early one. A spot
# notice comes through NoticePoller.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# default of AWS_EC2_METADATA_SERVICE_ENDPOINT, which AWS's own tools read too
SERVICE = "http://169.254.169.254"
EVERY = 5.0  # seconds between two polls, as AWS advises
PATIENCE = 2.0  # seconds for an answer
LIFE = 60  # seconds that a token is valid: each poll requests a new one
# the address belongs to the instance: no proxy reaches it
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Proposal:
    """A rank's requests at a step boundary, except for a stop."""

    save: bool = False
    fail: bool = False


@dataclass(frozen=True)
class Decision:
    """The requests of any rank, the same on all ranks."""

    stop: bool = False
    save: bool = False
    fail: bool = False


class Vote:
    """The vote at each step boundary, with the same decision on all ranks.

    Each call starts a sum over the ranks on their hosts (world.Tree) and reads the sum that
    the last call started. A step that took longer than a few messages already has it. So a rank's
    request reaches the fleet at the boundary after the next.
    """

    def __init__(self, file: Path | None, tree: Tree) -> None:
        """Starts voting; `file` requests a stop if it exists; only the rank with a file checks
        it.
        """
        self.file, self.tree = file, tree
        # this rank must stop: set by a signal, by the file, or by the holder of the vote
        self.heard = False
        self.votes = torch.zeros(3)
        self.under_way = False
        for number in SIGNALS:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True

    def agreed(self, proposal: Proposal) -> Decision:
        """Returns the decision of all ranks at this boundary."""
        decision = self.settle()
        self.heard = self.heard or (self.file is not None and self.file.exists())
        self.votes = torch.tensor([self.heard, proposal.save, proposal.fail], dtype=torch.float32)
        self.tree.begin(self.votes)
        self.under_way = True
        return decision

    def settle(self) -> Decision:
        """Returns the decision of the vote under way, if there is one, and ends that vote."""
        if not self.under_way:
            return Decision()
        self.tree.end()
        self.under_way = False
        return Decision(*(count > 0 for count in self.votes.tolist()))


class NoticePoller(threading.Thread):
    """A daemon thread that polls until there is a notice and calls `on_notice` with it; one per
    instance.
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
        """Prints once that no notice can be read."""
        if not self.trouble:
            print(
                f"no spot notice can be read from {service()}: {trouble}; with fleet.spot "
                "there may be one",
                flush=True,
            )
        self.trouble = trouble


def look() -> str:
    """Returns the notice, such as `terminate at 2026-11-20T08:22:00Z`; empty without a notice.

    Raises:
        OSError, HTTPException: the service did not answer, or not correctly.
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
        return text  # any answer here is a notice


def ask(path: str, method: str, headers: dict[str, str]) -> str:
    request = urllib.request.Request(service() + path, headers=headers, method=method)
    with DIRECT.open(request, timeout=PATIENCE) as answer:
        return str(answer.read().decode(errors="replace"))


def service() -> str:
    return os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", SERVICE).rstrip("/")
