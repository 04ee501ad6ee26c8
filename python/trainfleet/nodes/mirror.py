"""A run folder on the fleet, kept here too: its small files, brought over SSH as they change."""

from __future__ import annotations

import base64
import json
import os
import shlex
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from .answers import Failure, Host, Result, reason
from .changes import Known
from .transport import Transport

TIMEOUT = 30.0


@dataclass
class Mirror:
    """One run folder: `there`, under the fleet's shared folder, and `here`."""

    transport: Transport
    shared: str
    code: str
    python: str
    here: Path
    known: Known = field(default_factory=dict)  # what this mirror has brought

    def refresh(self, host: Host) -> float | Failure:
        """Brings what is new, asking `host`; the clock there. What it brought and is gone there goes here too."""
        while True:
            words = shlex.join(
                ["env", f"PYTHONPATH={self.code}/python", self.python, "-S", "-m", "trainfleet.nodes.changes", str(self.here)]
            )
            command = f"cd {shlex.quote(self.shared)} && {words}"
            answer = self.transport.ask(host, command, stdin=json.dumps(self.known), timeout=TIMEOUT)
            if failure := reason(host, answer):
                return failure
            assert isinstance(answer, Result)
            record = json.loads(answer.stdout)
            for name, (offset, size, stamp, inode, data) in record["files"].items():
                self._write(name, offset, zlib.decompress(base64.b85decode(data)), stamp)
                self.known[name] = (size, stamp, inode)
            for name in set(self.known) - set(record["paths"]):
                (self.here / name).unlink(missing_ok=True)
                self.known.pop(name)
            if record["whole"]:
                return float(record["now"])

    def _write(self, name: str, offset: int, data: bytes, stamp: float) -> None:
        """What grows is written in place, what is replaced there is replaced here; a name never leads out of the folder."""
        path = self.here / name
        if not path.resolve().is_relative_to(self.here.resolve()):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if offset:
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(data)
                file.truncate()
        else:
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_bytes(data)
            temporary.replace(path)
        os.utime(path, (stamp, stamp))
