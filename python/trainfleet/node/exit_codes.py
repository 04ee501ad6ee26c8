"""Exchanges the nodes' exit codes through S3. Node 0 must wait for all other nodes, because AWS
Batch stops them as soon as the main node exits.

<bucket>/<folder>/exits/<job and attempt>/<i> contains node i's exit code. Node i writes it once its
part has ended and its last log lines are in S3. Node 0 waits for all exit codes and then deletes
the files.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from ..storage import s3
from ..storage.s3_sync_agent import EVERY, NODES, SIGN
from ..trust.errors import S3Error

ELSEWHERE = 76  # exit code of node 0 if it succeeded but another node failed
SILENT = 6 * SIGN  # seconds without a heartbeat in S3 before an unfinished node counts as lost
# node number, exit code
NUMBER, CODE = re.compile(r"[0-9]{1,9}"), re.compile(r"[0-9]{1,3}")
LATE = 900.0  # maximum seconds until a node's first heartbeat in S3
Say = Callable[[str], None]


class ExitCodes:
    """Exit codes of one job attempt. `folder` is the S3 URL of the run's or dataset's folder."""

    def __init__(self, folder: str, attempt: str) -> None:
        self.folder = folder
        self.exits = f"{folder}/exits/{attempt}"
        self.codes: dict[int, int | None] = {}

    def publish(self, node: int, code: int, say: Say) -> None:
        """Writes a node's exit code. If S3 is unavailable, node 0 will count this node as lost."""
        try:
            s3.write(f"{self.exits}/{node}", str(code).encode())
        except S3Error as error:
            say(f"could not report this node's exit code to node 0: {error.what}")

    def collect(self, nodes: int, say: Say) -> dict[int, int | None]:
        """Waits until nodes 1 to `nodes` - 1 have ended. Returns their exit codes, with None for
        lost nodes.
        """
        began, said = time.monotonic(), False
        while True:
            with suppress(S3Error):  # retried in the next iteration
                self._look()
                away = set(range(1, nodes)) - set(self.codes)
                silent = away and self._silent(away, time.monotonic() - began)
                if away == silent or not away:
                    s3.remove_all(found.address for found in s3.list_objects(f"{self.exits}/"))
                    return self.codes | dict.fromkeys(away, None)
                if not said and time.monotonic() - began > SIGN:
                    said = True
                    say(
                        f"this node has finished; waiting for {len(away)} more nodes to exit, "
                        "because exiting now would stop them"
                    )
            time.sleep(EVERY)

    def _look(self) -> None:
        """Reads new exit codes from S3."""
        for found in s3.list_objects(f"{self.exits}/"):
            node = found.address.rpartition("/")[2]
            if NUMBER.fullmatch(node) and int(node) not in self.codes:
                code = (s3.read(found.address) or b"").decode(errors="replace")
                self.codes[int(node)] = int(code) if CODE.fullmatch(code) else 1

    def _silent(self, away: set[int], waited: float) -> set[int]:
        """Returns the nodes whose heartbeats in S3 have stopped, or never started within LATE
        seconds.
        """
        signs = {
            entry.address.rpartition("/")[2]: entry.modified
            for entry in s3.list_objects(f"{self.folder}/{NODES}/")
        }
        now = s3.clock(self.folder)
        return {
            node
            for node in away
            if (now - signs[str(node)] > SILENT if str(node) in signs else waited > LATE)
        }


def code_of(own: int, others: Mapping[int, int | None], again: int) -> int:
    """Returns node 0's exit code. If node 0 succeeded, the result depends on the other nodes:
    `again` if a machine was lost, or else ELSEWHERE if any node failed.
    """
    if own:
        return own
    if any(code is None or code in (again, 137) for code in others.values()):
        return again
    return ELSEWHERE if any(others.values()) else 0
