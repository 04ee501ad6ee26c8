"""Parses log lines. Strips the prefixes that launchers, loggers and log shippers add, both in known
formats and in formats learned from the log.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import localtime
from typing import Any

from ..storage.cloudwatch import FORWARDER
from ..trust import untrusted_input
from ..trust.errors import InputError

TRACEBACK = "Traceback (most recent call last)"
MOST = 10**7  # upper bound for rank numbers; larger numbers are not ranks
SHAPES = 16  # maximum number of prefixes to learn per log
_FRAME = '  File "'
_FAR = 200  # maximum prefix length in characters
_OBJECT = re.compile(r'\{\s{0,2}"')
_JSON = 1 << 16  # maximum length of a JSON line to parse, in characters
_MESSAGES = ("message", "msg", "log", "text", "event", "textPayload", "MESSAGE", "@message", "line")
_STACKS = ("exc_info", "exception", "stack_trace", "traceback", "stack", "exc_text")
# Prefixes, in this order: colors; ISO timestamps, with CRI's stream and flag; clock times and
# milliseconds since the epoch; pod, container and host names (pdsh, docker compose); labels from
# Ray, SkyPilot, MPI, srun and torch. Timestamps from Slurm's daemons are kept because they identify
# the writer.
_PREFIX = re.compile(
    r"""(?:\x1b\[[0-9;]*m
    |\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?[ ](?:(?:stdout|stderr)[ ][FP][ ])?(?:\#\#\[\w+\])?
    |\[\d{4}-\d\d-\d\d(?:[ ]\d\d:\d\d:\d\d(?:[.,]\d+)?|T\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d))\][ ]
    |\d{4}/\d\d/\d\d[ ]\d\d:\d\d:\d\d(?:\.\d+)?[ ]
    |\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?[ ](?:\|[ ])?
    |\d{13}[ ](?=\S|[ ]{2})
    |\w{3}[ ]+\d{1,2}[ ]\d\d:\d\d:\d\d[ ][\w.-]+[ ]
        (?:(?:python[\d.]*|torchrun|bash|sh|train[\w.-]*|docker|srun)(?:\[\d+\])?|(?!kernel)[\w./-]+\[\d+\]):[ ]
    |(?=[\w.-]*[\d_-])[\w.-]{2,60}[ ]+\|[ ](?!.*[ ]\|[ ])
    |\[(?:pod/)?[\w.-]+/[\w./-]+\][ ]
    |\[(?=[^\]]{0,60}\d)(?:algo|worker|node|host|trainer|ip|gpu|pod)\b[\w .:|/=-]{0,60}?(?:rank[ =:]?(?P<tag>\d+))?\]:?[ ]?
    |\[rank[ ](?P<word>\d+)\]:?[ ]
    |[Rr]ank[ ]?(?P<colon>\d+):[ ](?=[ ]{2}|[\[(]|Traceback|[A-Z])
    |[\w-]+/[\w-]+/[\w-]{6,}[ ](?=\S|[ ]{2})
    |>[ ](?!>)
    |\((?:\w+,[ ])?(?:rank[ =](?P<sky>\d+)(?:,[ ])?)?(?:pid=\d+)?(?:,[ ]ip=[\d.]+)?\)[ ]
    |\(\w+[ ]pid=\d+(?:,[ ]ip=[\d.]+)?\)[ ]
    |(?!(?:nvme|ib\d|eth|en|mlx|efa|rank|nd\d|mount|python|bash|sh:))(?=[a-z\d.-]{0,60}\d[a-z\d.-]{0,60}:)(?!\d+:)
        [a-z\d][a-z\d.-]{0,99}:[ ](?=\S|[ ]{2})(?!client_loop:|ssh[ ])
    |(?:\w{3}[ ]\w{3}[ ]+\d+[ ][\d:]{8}[ ]\d{4})?\[(?:\d+,(?:mpirank:)?)?(?P<mpi>\d+)(?:,[\w.-]+)?\]<std(?:out|err)>:[ ]?
    |\[(?:default|trainer)\d*\|?\d*\]:[ ]?
    |\[rank(?P<rank>\d+)\]:[ ]?
    |[ ]{0,4}(?P<slurm>\d+):[ ](?=[ ]{2}|[\[(]|Traceback|\w)
    |[A-Za-z][\w.-]*:[ ](?=Traceback[ ]\(|[ ]{2}File[ ]"))""",  # noqa: E501
    re.VERBOSE,
)
# _PREFIX groups that contain a rank
_RANKS = ("rank", "mpi", "slurm", "tag", "word", "colon", "sky")
_TOKEN = re.compile(
    r"(?P<rank>(?i:rank)[ =:]{0,2})\d+"
    r"|(?P<level>\b(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b)|(?P<number>[\w.]*\d[\w.]*)"
    r"|(?P<blank>\s+)|(?P<rest>.)"
)
_LEVEL = r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)"
_WARNS = re.compile(r"\bW(?:ARN(?:ING)?)?\b|\[W")
# progress bar without a line break
_GLUED = re.compile(r".{0,300}\[\d+:\d\d(?::\d\d)?<[^\]]*\](?=[A-Z\[])")
_BOX = re.compile(r"\s*[│|]$")
Shapes = tuple[re.Pattern[str], ...]


def strip(text: str, own: Shapes = ()) -> tuple[int | None, str]:
    """Returns the rank in a line's prefixes, if any, and the indented text after the prefixes.
    `own` contains prefixes learned from the log.
    """
    rank, text = None, text.removesuffix("\r").removesuffix("\x1b[0m")
    if "<" in text and (match := _GLUED.match(text)):
        text = text[match.end() :]
    while match := _PREFIX.match(text):
        number = next(filter(None, match.group(*_RANKS)), None)
        rank = untrusted_input.whole(number, MOST) if number else rank
        if not match.end():
            break
        text = text[match.end() :]
    for shape in own:
        if match := shape.match(text):
            rest = text[match.end() :]
            if _WARNS.search(match[0]) and not rest.startswith((" ", TRACEBACK)):
                continue
            number = match.groupdict().get("rank")
            return untrusted_input.whole(number, MOST) if number else rank, _BOX.sub(
                "", rest
            ) if match[0][0] in "│|" else rest
    return rank, text


def learned(texts: Iterable[str]) -> Shapes:
    """Returns patterns for a log's unknown prefixes, which are those before both headers and frames
    of its tracebacks. Also learns a common left margin.
    """
    texts = [text for text in texts if text and not text.isspace()]
    frames = _prefixes(texts, _FRAME)
    shapes = [shape for shape in _prefixes(texts, TRACEBACK) if shape in frames][:SHAPES]
    margin = min((len(text) - len(text.lstrip(" ")) for text in texts), default=0)
    margins = [" " * margin] if 0 < margin < _FAR else []
    return tuple(map(re.compile, [*shapes, *margins]))


def _prefixes(texts: Iterable[str], mark: str) -> dict[str, None]:
    """Returns the unknown prefixes of lines that contain `mark`, as regular expressions."""
    marked = (text for text in texts if text.partition(mark)[0].strip() and mark in text)
    unknown = (strip(text)[1].partition(mark)[0] for text in marked)
    short = (before for before in unknown if before.strip() and len(before) <= _FAR)
    return dict.fromkeys(map(_shape, islice(short, 4096)))


def _shape(before: str) -> str:
    """Returns a regular expression that generalizes a prefix to any numbers and log levels."""
    shape, told = "", False
    for token in _TOKEN.finditer(before):
        if token["rank"]:
            shape += re.escape(token["rank"]) + (r"\d+" if told else r"(?P<rank>\d+)")
            told = True
        elif token["blank"]:
            shape += re.escape(token[0]) if token.end() == len(before) else r"\s+"
        else:
            shape += (
                _LEVEL
                if token["level"]
                else r"[\w.]*\d[\w.]*"
                if token["number"]
                else re.escape(token[0])
            )
    return shape


def opened(text: str) -> tuple[list[str], int | None, str]:
    """Unpacks a JSON line from a log shipper or structured logger into text lines, rank and
    timestamp. The list of lines is empty if the line is not JSON.
    """
    record = _object(text)
    if isinstance(payload := record.get("jsonPayload"), dict):
        record |= payload
    texts = {key: text for key, text in record.items() if isinstance(text, str)}
    said = [texts[key] for key in _MESSAGES if key in texts][:1]
    if not said:
        return [], None, ""
    said += [texts[key] for key in _STACKS if key in texts]
    lines = "\n".join(said).splitlines() or [""]
    if _WARNS.search(str(record.get("level", record.get("severity", ""))).upper()):
        lines = [f"WARNING: {line}" for line in lines]
    inner = opened(lines[0] if len(lines) == 1 else "")
    return inner if inner[0] else (lines, _rank_of(record), _stamp_of(record))


def _object(text: str) -> dict[str, Any]:
    """Returns a line's JSON object, or {} if the line is not one."""
    with suppress(ValueError, RecursionError):
        if _OBJECT.match(text) and len(text) < _JSON and text.rstrip().endswith("}"):
            return dict(json.loads(text))
    return {}


def _rank_of(record: dict[str, Any]) -> int | None:
    rank = next((str(record[key]) for key in ("rank", "global_rank", "RANK") if key in record), "")
    return untrusted_input.whole(rank, MOST)


def _stamp_of(record: dict[str, Any]) -> str:
    keys = ("time", "timestamp", "ts", "@timestamp", "asctime", "date")
    return next((record[key][:40] for key in keys if isinstance(record.get(key), str)), "")


DAY = 86400.0
HEAD, TAIL = 1 << 18, 7 << 20  # bytes to read from the start and end of a log
ALL = 96 << 20  # maximum bytes to read from all logs together
LONGEST = 4000  # maximum number of characters to examine per line
_STAMP = re.compile(r"(?:rank (\d+)|(\w+)) +(?P<clock>\d\d:\d\d:\d\d\.\d{3}) \| ?(.*)", re.DOTALL)
_FORWARDED = re.compile(rf"{FORWARDER} +\d\d:\d\d:\d\d\.\d{{3}} \|")
# clock time, but not a progress bar's `elapsed<remaining`
_CLOCK = re.compile(r"(?<![\d<])(?P<clock>\d\d:\d\d:\d\d(?:[.,]\d+)?)(?![\d<])")
# colors, cursor movements and hyperlinks
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
    """One line of a node's log. `time` is in seconds since midnight. The writer is a rank, or else
    agent, kernel or node.
    """

    time: float
    node: int | None
    rank: int | None
    who: str
    text: str


def read_lines(log: Path, node: int | None, start: int = 0, logs: int = 1) -> list[LogLine]:
    """Reads a node's log from byte `start`. If it exceeds the size limit, which is shared among
    `logs` logs, reads only its beginning and end.
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
    except (FileNotFoundError, InputError):  # missing, or a symbolic link, which nodes never create
        return []
    return list(parse(data.decode(errors="replace").splitlines(), node))


def parse(lines: Iterable[str], node: int | None) -> Iterator[LogLine]:
    """Splits lines into timestamp and text. A line without a timestamp inherits the previous line's
    writer, and its time unless it contains a clock time. The first clock time in a log also applies
    to all earlier lines.
    """
    # The log forwarder's own lines are not about the job.
    lines = [text for text in lines if not _FORWARDED.match(text)]
    clocks = (time for text in lines if (time := _clock_of(text)) is not None)
    time, rank, who = next(clocks, 0.0), None, "agent"
    for text in lines:
        held, told, stamp = opened(text)
        if held:
            time = _clock(stamp, time)
            told, whose = (rank, who) if told is None else (told, "agent")
            yield from (LogLine(time, node, told, whose, said[:LONGEST]) for said in held)
            continue
        text = _COLOURS.sub("", text)[:LONGEST]
        if match := _STAMP.fullmatch(text):
            number, other, clock, text = match.groups("")
            rank, who = untrusted_input.whole(number, MOST), other or "rank"
            time = _seconds(clock)
        elif (rank, who) == (None, "agent"):
            time = _clock(text[:60], time)
        yield LogLine(time, node, rank, who, text)


def _clock(text: str, time: float) -> float:
    """Returns the text's clock time, or else `time`."""
    return _seconds(match["clock"]) if (match := _CLOCK.search(text)) else time


def _clock_of(text: str) -> float | None:
    match = _STAMP.fullmatch(text[:LONGEST]) or _CLOCK.search(text[:60])
    return _seconds(match["clock"]) if match else None


def stamp_of(text: str) -> float | None:
    """Returns a log line's timestamp in seconds since midnight, or None."""
    match = _STAMP.fullmatch(text.rstrip("\n"))
    return _seconds(match[3]) if match else None


@functools.lru_cache(maxsize=1024)  # Consecutive lines often share a timestamp.
def _seconds(clock: str) -> float:
    hours, minutes, seconds = clock.split(":")
    return (int(hours) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))) % DAY


def time_of_day(moment: float) -> float:
    """Converts a unix time to seconds since local midnight, as in log timestamps."""
    local = localtime(moment)
    return (local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec + moment % 1) % DAY


def is_closing(text: str) -> bool:
    """Returns whether the line reports successful completion."""
    return _CLOSING.search(text) is not None


def is_progress(text: str) -> bool:
    """Returns whether the line reports a training step, with the step's number and a metric."""
    return is_closing(text) or (
        _COUNT.search(text) is not None and _MEASURE.search(text) is not None
    )


def is_calm(text: str) -> bool:
    """Returns whether the line neither reports a problem nor continues a message that does."""
    return bool(text.strip()) and not text[0].isspace() and _CAUTION.search(text) is None
