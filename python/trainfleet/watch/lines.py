"""Reads the lines of the nodes' logs: the writer of each, its time, and the text behind the
launchers' prefixes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import localtime

from ..storage.cloudwatch import FORWARDER
from ..trust import untrusted_input
from ..trust.errors import InputError
from .prefixes import MOST, opened

DAY = 86400.0
HEAD, TAIL = 1 << 18, 7 << 20  # bytes of a log that are read after its start and before its end
ALL = 96 << 20  # bytes of all logs together
LONGEST = 4000  # characters of a line that are examined
_STAMP = re.compile(r"(?:rank (\d+)|(\w+)) +(\d\d:\d\d:\d\d\.\d{3}) \| ?(.*)", re.DOTALL)
# a clock, but not a progress bar's `elapsed<remaining`
_CLOCK = re.compile(r"(?<![\d<])(\d\d:\d\d:\d\d(?:[.,]\d+)?)(?![\d<])")
# colours, cursor moves and links
_COLOURS = re.compile(
    r"\x1b\[[\d;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b\]8;[^\x1b\x07]*(?:\x1b\\\\|\x07)"
)
_COUNT = re.compile(r"(?i)\b(?:step|iter(?:ation)?|epoch|batch)s?\b\W{0,4}\d+")
_MEASURE = re.compile(
    r"(?i)\bloss\b|\btokens?/s|\bit/s|s/it|\bsamples\b|\blr\b|\bacc|\bgrad|\bppl\b|\d+ ?/ "
    r"?\d+|perplexity"
)
_CLOSING = re.compile(r"^(?:finished|stopped)\b.*\d|^[Tt]raining (?:complete|finished|done)")
_CAUTION = re.compile(
    r"\bW(?:ARN(?:ING)?)?\b|\[[WEF]\d* |<warn>|NCCL "
    r"INFO|[Rr]etry|\bE(?:RROR)?\b|[Ee]rror|[Ff]ail|Exception|refused"
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a node's log: seconds of the day, and its writer: a rank, or else agent, kernel
    or node.
    """

    time: float
    node: int | None
    rank: int | None
    who: str
    text: str


def read_lines(log: Path, node: int | None, start: int = 0, logs: int = 1) -> list[LogLine]:
    """Reads the lines of a node's log after byte `start`. If it is too long, reads its first and
    last lines; `logs` logs share the limit.
    """
    try:
        with untrusted_input.open_regular(log) as file:
            size = file.seek(0, 2)
            head, tail = min(HEAD, ALL // logs // 8), min(TAIL, ALL // logs)
            file.seek(start)
            if size - start <= head + tail:
                data = file.read()
            else:
                data = file.read(head).rpartition(b"\n")[0] + b"\n"
                file.seek(size - tail)
                data += file.read().partition(b"\n")[2]
    except (FileNotFoundError, InputError):  # missing, or a link: a log that no node has written
        return []
    return list(parse(data.decode(errors="replace").splitlines(), node))


def parse(lines: Iterable[str], node: int | None) -> Iterator[LogLine]:
    """Splits lines into stamp and text. A line without a stamp belongs to the line before it, and
    has that one's time unless it shows another.
    """
    lines = list(lines)
    time, rank, who = (
        next((time for text in lines if (time := _clock_of(text)) is not None), 0.0),
        None,
        "agent",
    )
    for text in lines:
        held, told, stamp = opened(text)
        if held:
            time = _seconds(match[1]) if (match := _CLOCK.search(stamp)) else time
            yield from (
                LogLine(
                    time,
                    node,
                    rank if told is None else told,
                    who if told is None else "agent",
                    said[:LONGEST],
                )
                for said in held
            )
            continue
        text = (_COLOURS.sub("", text) if "\x1b" in text else text)[:LONGEST]
        if match := _STAMP.fullmatch(text):
            number, other, clock, text = match.groups()
            if other == FORWARDER:  # it writes nothing about the job
                continue
            time, rank, who = (
                _seconds(clock),
                untrusted_input.whole(number or "", MOST),
                other or "rank",
            )
        elif who == "agent" and rank is None and (match := _CLOCK.search(text[:60])):
            time = _seconds(match[1])
        yield LogLine(time, node, rank, who, text)


def _clock_of(text: str) -> float | None:
    """Returns the clock of a line, if it has one. Lines before the first clock count as having the
    same time.
    """
    match = _STAMP.fullmatch(text[:LONGEST])
    if match is None and (match := _CLOCK.search(text[:60])):
        return _seconds(match[1])
    return None if match is None or match[2] == FORWARDER else _seconds(match[3])


def stamp_of(text: str) -> float | None:
    """Returns the clock of a line of a node's log, in seconds of the day; None without a stamp."""
    match = _STAMP.fullmatch(text.rstrip("\n"))
    return _seconds(match[3]) if match else None


@functools.lru_cache(maxsize=1024)  # consecutive lines have the same clock
def _seconds(clock: str) -> float:
    hours, minutes, seconds = clock.split(":")
    return (int(hours) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))) % DAY


def time_of_day(moment: float) -> float:
    """Returns seconds of the local day, like stamps in logs; `moment`: unix time."""
    local = localtime(moment)
    return (local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec + moment % 1) % DAY


def is_closing(text: str) -> bool:
    """Tells whether the line reports that the work ended as it should."""
    return _CLOSING.search(text) is not None


def is_progress(text: str) -> bool:
    """Tells whether the line reports a step the way training loops do: its number with a
    measure.
    """
    return is_closing(text) or (
        _COUNT.search(text) is not None and _MEASURE.search(text) is not None
    )


def is_calm(text: str) -> bool:
    """Tells whether the line is neither a complaint nor a part of one."""
    return bool(text.strip()) and not text[0].isspace() and _CAUTION.search(text) is None
