"""Strips the text that launchers, loggers and shippers put before a line: known forms, and those
that a log shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ..trust import untrusted_input

TRACEBACK = "Traceback (most recent call last)"
MOST = 10**7  # ranks; a larger number is not a rank
SHAPES = 16  # prefixes that are learned from one log
_FRAME = '  File "'
_FAR = 200  # characters that a prefix may have
_JSON = 1 << 16  # characters of a JSON line that is parsed
_MESSAGES = ("message", "msg", "log", "text", "event", "textPayload", "MESSAGE", "@message", "line")
_STACKS = ("exc_info", "exception", "stack_trace", "traceback", "stack", "exc_text")
# Colours, ISO stamps (with CRI's stream and flag; not Slurm's daemons', which say who speaks), bare
# clocks and milliseconds of an epoch, the names of pods, containers and hosts (pdsh's, docker
# compose's), Ray's, SkyPilot's, MPI's, srun's and torch's labels.
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
_TOKEN = re.compile(
    r"(?P<rank>(?i:rank)[ =:]{0,2})\d+"
    r"|(?P<level>\b(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b)|(?P<number>[\w.]*\d[\w.]*)"
    r"|(?P<blank>\s+)|(?P<rest>.)"
)
_LEVEL = r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)"
_WARNS = re.compile(r"\bW(?:ARN(?:ING)?)?\b|\[W")
# a progress bar without a line end
_GLUED = re.compile(r".{0,300}\[\d+:\d\d(?::\d\d)?<[^\]]*\](?=[A-Z\[])")
_BOX = re.compile(r"\s*[│|]$")
Shapes = tuple[re.Pattern[str], ...]


def strip(text: str, own: Shapes = ()) -> tuple[int | None, str]:
    """Returns the rank that a line's prefixes name, if any, and the text behind them with its
    indentation. `own`: the log's own prefixes.
    """
    rank, text = None, text.removesuffix("\r").removesuffix("\x1b[0m")
    if "<" in text and (match := _GLUED.match(text)):
        text = text[match.end() :]
    while match := _PREFIX.match(text):
        number = next(
            (
                match[name]
                for name in ("rank", "mpi", "slurm", "tag", "word", "colon", "sky")
                if match[name]
            ),
            None,
        )
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
    """Finds a log's prefixes that are in no list: text that is before both heads and frames of its
    tracebacks.
    """
    heads, frames, margin = dict[str, None](), set[str](), _FAR
    for text in texts:
        if margin and text and not text.isspace():
            margin = min(margin, len(text) - len(text.lstrip(" ")))
        mark = TRACEBACK if TRACEBACK in text else _FRAME if _FRAME in text else ""
        if not mark or not text.partition(mark)[0].strip() or len(heads) + len(frames) > 256:
            continue
        before = strip(text)[1].partition(mark)[0]
        if not before.strip() or len(before) > _FAR:
            continue
        if mark is TRACEBACK:
            heads[_shape(before)] = None
        else:
            frames.add(_shape(before))
    shapes = [shape for shape in heads if shape in frames][:SHAPES]
    return tuple(map(re.compile, [*shapes, *([" " * margin] if 0 < margin < _FAR else [])]))


def _shape(before: str) -> str:
    """Returns a pattern for prefixes that differ from this one only in numbers and levels."""
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
    """Returns the lines, rank and stamp in a line of JSON, as shippers and structured loggers write
    it; [] if it is not one.
    """
    if not (
        text[:1] == "{" and '"' in text[:4] and len(text) < _JSON and text.rstrip().endswith("}")
    ):
        return [], None, ""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return [], None, ""
    if isinstance(payload := record.get("jsonPayload"), dict):
        record |= payload
    said = next((record[key] for key in _MESSAGES if isinstance(record.get(key), str)), None)
    if said is None:
        return [], None, ""
    stacks = [record[key] for key in _STACKS if isinstance(record.get(key), str)]
    lines = [line for part in (said, *stacks) for line in part.splitlines()] or [""]
    if _WARNS.search(str(record.get("level", record.get("severity", ""))).upper()):
        lines = [f"WARNING: {line}" for line in lines]
    inner = opened(lines[0]) if len(lines) == 1 else ([], None, "")
    return inner if inner[0] else (lines, _rank_of(record), _stamp_of(record))


def _rank_of(record: dict[str, Any]) -> int | None:
    rank = next((str(record[key]) for key in ("rank", "global_rank", "RANK") if key in record), "")
    return untrusted_input.whole(rank, MOST)


def _stamp_of(record: dict[str, Any]) -> str:
    keys = ("time", "timestamp", "ts", "@timestamp", "asctime", "date")
    return next((record[key][:40] for key in keys if isinstance(record.get(key), str)), "")
