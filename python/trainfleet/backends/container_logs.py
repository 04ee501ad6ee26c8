"""Fetches the engine's own record of a job's output, for nodes without a log in the run's folder in
S3.

The entrypoint's log comes first: it is complete, seconds old, and next to the checkpoints. If a
node died before its entrypoint, or could not write to S3, only the engine has its output. Its lines
go to logs/engine-<i>.log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..cloud import log_streams
from ..cloud.calls import Calls
from ..run import run_folder
from ..storage import s3, sync_rules

PATIENCE = 30.0  # seconds that a container gets to begin, before its console is read
OBJECT = re.compile(r".+/node-(\d{1,9})\.log(?:/[^/]+)?")


@dataclass(frozen=True)
class Console:
    """The engine's record of containers' output: a group of CloudWatch Logs, and each node's stream
    in it.

    `began` is the unix time at which the newest attempt's containers began.
    """

    began: float
    ended: bool
    group: str
    streams: Mapping[int, str]


@dataclass
class Consoles:
    """Brings the lines of nodes that left no log; each call brings the new ones."""

    calls: Calls
    tokens: dict[str, str] = field(default_factory=dict)  # by stream: the position read so far

    def bring(self, console: Console | None, folder: Path, address: str) -> None:
        """Brings new lines to `folder`, the run's or the dataset's, which is at `address` in S3.

        Raises:
            CloudError, S3Error: a service does not answer, or the credentials may not ask it.
        """
        if console is None or not (console.ended or s3.clock(address) - console.began > PATIENCE):
            return
        spoke = self._spoke(console, address)
        for node, stream in console.streams.items():
            log = run_folder.engine_log(folder, node)
            if node in spoke:
                log.unlink(missing_ok=True)
                continue
            size = run_folder.size_of(log) if stream in self.tokens else 0
            lines, self.tokens[stream] = log_streams.read(
                self.calls, console.group, stream, self.tokens.get(stream, "")
            )
            if lines or not size:
                text = "".join(f"{line}\n" for line in lines)
                sync_rules.write(folder, str(log.relative_to(folder)), size, text.encode())

    def _spoke(self, console: Console, address: str) -> set[int]:
        """Returns the nodes with logs in S3 that have grown since the containers began."""
        found = s3.list_objects(f"{address}/logs/node-")
        since = int(console.began)  # S3's times have whole seconds
        return {
            int(match[1])
            for one in found
            if one.modified >= since and (match := OBJECT.fullmatch(one.address))
        }
