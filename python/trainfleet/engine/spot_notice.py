"""Polls an instance's metadata service for EC2's notice, two minutes ahead, that a spot instance
will be reclaimed.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException

# default of AWS_EC2_METADATA_SERVICE_ENDPOINT, which AWS's own tools read too
SERVICE = "http://169.254.169.254"
EVERY = 5.0  # seconds between two polls, as AWS advises
PATIENCE = 2.0  # seconds for an answer
LIFE = 60  # seconds that a token is valid: each poll requests a new one
# the address belongs to the instance: no proxy reaches it
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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
