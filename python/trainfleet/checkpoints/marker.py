"""The marker: the file that is written last and makes a checkpoint of the files beside it.

It says where training stood, what trained it, and the size and checksum of every other file; the first line is the checksum of
the rest, so that no byte of a checkpoint, the marker's own among them, can change unnoticed.
"""

from __future__ import annotations

import json
import platform
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .. import __version__
from ..errors import RunError

MARKER = "committed.json"
MARKER_BYTES = 2**25  # no marker is larger: one of ten thousand ranks has a megabyte
FORMAT = 2
_TEXT = re.compile(r'\{"crc32": "([0-9a-f]{8})",\n"commit": (\{.*\})\}\n', re.DOTALL)


@dataclass(frozen=True)
class File:
    """The size and CRC-32 of a file as its writer sent it out, before any disk had it."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Commit:
    """What a marker says. `config` is the resolved config, flat: `train.steps` → 500."""

    step: int
    samples: int
    tokens: int
    seconds_trained: float
    loss: float | None
    time: float
    world_size: int
    layout: Mapping[str, int]
    dataset: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    files: Mapping[str, File]
    format: int = FORMAT
    guard: tuple[float, ...] = ()  # what steps lately were like (engine.guard); markers of before it was there have none

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class Broken(RunError):
    """A checkpoint is not as it was committed."""

    def __init__(self, what: str, *, where: str, why: str = "", next: str = "make checkpoints shows which are good") -> None:
        super().__init__(what, where=where, why=why, next=next)


def render(commit: Commit) -> str:
    """The marker's text; `parse` takes exactly this and nothing else."""
    body = json.dumps(asdict(commit), indent=1)
    return f'{{"crc32": "{_checksum(body)}",\n"commit": {body}}}\n'


def parse(text: str, where: str) -> Commit:
    """What a marker's text says.

    Raises:
        Broken: it is not what was written.
        RunError: it is, but by a program of another format.
    """
    match = _TEXT.fullmatch(text)
    if match is None or match[1] != _checksum(match[2]):
        raise Broken(f"{MARKER} is damaged", where=where, why="its text does not fit its checksum")
    content = json.loads(match[2])
    if content["format"] != FORMAT:
        raise RunError(
            f"is a checkpoint of format {content['format']}, this program reads {FORMAT}",
            where=where,
            why=f"written by trainfleet {content.get('versions', {}).get('trainfleet')}",
            next="train under another name: make train SET='name=again'",
        )
    files = {name: File(**file) for name, file in content.pop("files").items()}
    return Commit(**content | {"guard": tuple(content.get("guard", ()))}, files=files)


def versions(**others: str) -> dict[str, str]:
    """Of this program and what it stands on."""
    return {"trainfleet": __version__, "python": platform.python_version(), **others}


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
