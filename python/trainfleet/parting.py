"""Nodes leave a job together where its engine goes by the first one: AWS Batch stops all others as soon as the main node ends.

<bucket>/<folder>/exits/<job and attempt>/<i> is the exit code of node i, written when its part has ended and its last words are
in S3. Node 0 stays until all have left, and takes the files away.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from . import s3
from .errors import S3Error
from .uplink import EVERY, NODES, SIGN

ELSEWHERE = 76  # the exit code of node 0 when its own part has ended well, and another node's has not
SILENT = 6 * SIGN  # seconds without a sign of a node that has not left after which it is taken for lost
NUMBER, CODE = re.compile(r"[0-9]{1,9}"), re.compile(r"[0-9]{1,3}")  # of a node, and how it ended
LATE = 900.0  # seconds that a node may take to give its first sign
Say = Callable[[str], None]


class Parting:
    """The exit codes of one attempt of a job, below `folder`, the address of the run's or dataset's folder."""

    def __init__(self, folder: str, attempt: str) -> None:
        self.folder, self.exits = folder, f"{folder}/exits/{attempt}"
        self.codes: dict[int, int | None] = {}

    def leave(self, node: int, code: int, say: Say) -> None:
        """Says how a node's part has ended. Where S3 is away, the node's silence will say that it is not there."""
        try:
            s3.write(f"{self.exits}/{node}", str(code).encode())
        except S3Error as error:
            say(f"node 0 does not know that this node has ended: {error.what}")

    def gather(self, nodes: int, say: Say) -> dict[int, int | None]:
        """The exit codes of nodes 1 to `nodes` - 1, once all have left; None of one that is silent."""
        began, told = time.monotonic(), False
        while True:
            with suppress(S3Error):  # the next look finds out
                self._look()
                away = set(range(1, nodes)) - set(self.codes)
                silent = away and self._silent(away, time.monotonic() - began)
                if away == silent or not away:
                    s3.remove_all(found.address for found in s3.list_objects(f"{self.exits}/"))
                    return self.codes | dict.fromkeys(away, None)
                if not told and time.monotonic() - began > SIGN:
                    told = True
                    say(f"this node's part is done; it stays until {len(away)} more have left, as its end would end them")
            time.sleep(EVERY)

    def _look(self) -> None:
        """Reads the codes that have come since the last look."""
        for found in s3.list_objects(f"{self.exits}/"):
            node = found.address.rpartition("/")[2]
            if NUMBER.fullmatch(node) and int(node) not in self.codes:
                code = (s3.read(found.address) or b"").decode(errors="replace")
                self.codes[int(node)] = int(code) if CODE.fullmatch(code) else 1

    def _silent(self, away: set[int], waited: float) -> set[int]:
        """Those who gave a sign and give none any more, and those who never gave one in LATE seconds."""
        signs = {entry.address.rpartition("/")[2]: entry.modified for entry in s3.list_objects(f"{self.folder}/{NODES}/")}
        now = s3.clock(self.folder)
        return {node for node in away if (now - signs[str(node)] > SILENT if str(node) in signs else waited > LATE)}


def code_of(own: int, others: Mapping[int, int | None], again: int) -> int:
    """Node 0's exit code: its own, or one that says how others have ended; `again` where a machine went away."""
    if own:
        return own
    if any(code is None or code in (again, 137) for code in others.values()):
        return again
    return ELSEWHERE if any(others.values()) else 0
