"""The marker: the file that is written last and makes a checkpoint of the files beside it.

It says where training stood, what trained it, and the size and checksum of every other file; the first line is the checksum of
the rest, so that no byte of a checkpoint, the marker's own among them, can change unnoticed.
"""

from __future__ import annotations

import json
import platform
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from .. import __version__
from ..trust.errors import RunError

MARKER = "committed.json"
NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,14})")  # as step_name writes it, and in no second way
BROKEN = re.compile(rf"{NAME.pattern}\.broken")
MARKER_BYTES = 2**25  # no marker is larger: one of ten thousand ranks has a megabyte
FORMAT = 4
_FILE = re.compile(r"[A-Za-z0-9._-]{1,200}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TEXT = re.compile(r'\{"crc32": "([0-9a-f]{8})",\n"commit": (\{.*\})\}\n', re.DOTALL)


@dataclass(frozen=True)
class FileSum:
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
    files: Mapping[str, FileSum]
    format: int = FORMAT
    guard: tuple[float, ...] = ()  # what steps lately were like (engine.guard)
    scale: tuple[float, ...] = ()  # the loss scale of fp16 (engine.loss_scale)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class Broken(RunError):
    """A checkpoint is not as it was committed."""

    def __init__(self, what: str, *, where: str, why: str = "", then: str = "make checkpoints shows which are good") -> None:
        super().__init__(what, where=where, why=why, next=then)


def render(commit: Commit) -> str:
    """The marker's text; `parse` takes exactly this and nothing else."""
    body = json.dumps(asdict(commit), indent=1)
    return f'{{"crc32": "{_checksum(body)}",\n"commit": {body}}}\n'


def parse(text: str, where: str) -> Commit:
    """What a marker's text says.

    Raises:
        Broken: it is not what was written, or says what can't be so.
        RunError: it is, but by a program of another format.
    """
    match = _TEXT.fullmatch(text)
    if match is None or match[1] != _checksum(match[2]):
        raise Broken(f"{MARKER} is damaged", where=where, why="its text does not fit its checksum")
    content = _object(match[2], where)
    if content.get("format") != FORMAT:
        shown = json.dumps(content.get("format"))[:20]
        raise RunError(
            f"is a checkpoint of format {shown}, and this program reads format {FORMAT}",
            where=where,
            why="another version of trainfleet wrote it",
            next="make export with that version, then make train SET='name=again train.init_from=the folder'",
        )
    wrong = [key for key, fits in FIELDS.items() if key not in content or not fits(content[key])]
    if wrong or content.keys() - FIELDS.keys():
        why = f"its {', '.join(wrong) or 'keys'} can't be what a save writes"
        raise Broken(f"{MARKER} can't be believed", where=where, why=why)
    files = {name: FileSum(**file) for name, file in content.pop("files").items()}
    return Commit(**content | {name: tuple(content[name]) for name in STATES}, files=files)


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise Broken(f"{MARKER} can't be believed", where=where, why=f"it is no JSON object: {error}") from error


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 10**15


def _real(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 10**11  # seconds: after the year 5000 there are no dates


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 10_000 and not _CONTROL.search(value)


def _plain(value: Any, depth: int = 4) -> bool:
    """Whether a config could have it as a value."""
    if isinstance(value, list | dict):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        return depth > 0 and all(_plain(item, depth - 1) for item in inside)
    return value is None or _text(value) or (type(value) in (bool, int, float) and abs(value) < 10**30)


def _files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _FILE.fullmatch(name)
        and name not in (MARKER, ".", "..")
        and isinstance(file, dict)
        and file.keys() == {"size", "crc32"}
        and all(map(_count, file.values()))
        for name, file in value.items()
    )


def _state(numbers: int, counts: int, value: Any) -> bool:
    """Whether a part of the engine's state is so many numbers and then so many counts, or none at all."""
    if not isinstance(value, list) or len(value) not in (0, numbers + counts):
        return False
    return all(type(number) in (int, float) and abs(number) < 10**39 for number in value) and all(map(_count, value[numbers:]))


def _table(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(_text(key) and of(item) for key, item in value.items())


STATES = {"guard": (5, 3), "scale": (1, 3)}  # of the engine: so many numbers, and so many counts after them
# What each field may be: a marker may come from elsewhere, and its checksum says only that it came whole.
FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "samples", "tokens", "world_size", "format"), _count),
    "seconds_trained": _real,
    "time": lambda value: _real(value) and value >= 0,
    "loss": lambda value: value is None or _real(value),
    "layout": _table(_count),
    "dataset": _text,
    "config": _table(_plain),
    "versions": _table(_text),
    "files": _files,
    "guard": partial(_state, *STATES["guard"]),
    "scale": lambda value: _state(*STATES["scale"], value) and (not value or value[0] > 0),
}


def versions(**others: str) -> dict[str, str]:
    """Of this program and what it stands on."""
    return {"trainfleet": __version__, "python": platform.python_version(), **others}


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
