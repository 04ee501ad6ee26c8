"""Classifies a process's exceptions by message, by the code that raised them, and by the operation
in progress.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import replace

from .causes import Weight, firm_causes, first_sign
from .evidence import (
    Evidence,
    Found,
    ProcessLines,
    Writer,
    firmer,
    heavier,
    implied,
    signed,
    stated,
)
from .tracebacks import BUGS, PROGRAM, PrintedException

RESTORING = re.compile(
    r"(?i)(?:load|restore|resume|read)_?\w*(?:checkpoint|ckpt|state)|\bresume\b|(?:torch/distributed/checkpoint|/orbax|/tensorstore)/"
    r"|torch/serialization\.py \w*load"
)
# code that launches a program
STARTING = re.compile(
    r"subprocess\.py "
    r"_execute_child|\bsubprocess\.\w+\(|\bPopen\(|\bcheck_(?:output|call)\(|\bos\.exec\w+\("
)
# errno(3) numbers as printed by Rust and C
_NUMBER = re.compile(
    r"\bOs \{ code: (?P<code>\d+),|\(os error (?P<number>\d+)\)|(?<![\w.])(?P<name>E[A-Z]{3,12})\b"
)
_LAST = re.compile(r"Last error:\n(?!NCCL WARN)(.+)")
# functions that write files
SAVING = re.compile(r"(?im) _?(?:save|write|dump)(?:$|_\w*$|checkpoint|state)")
# one of the program's own files
OWN = re.compile(
    r"^(?!.*(?:/(?:site|dist)-packages/|/lib/python\d|\.pxi\b|\.pyx\b|<frozen|<string))\S"
)
# library file, except for libraries that call back into the program
LIBRARY = re.compile(
    r"/(?:site|dist)-packages/(?!torch/(?:nn/modules/module|multiprocessing|utils/data)|torch_xla)"
)
MISFIT = re.compile(  # errors in a library that expects another version of its dependency
    r"unexpected keyword argument|takes (?:from )?\d+ .{0,30}positional arguments? but"
    r"|(?:module|type object) '[\w.]+' has no attribute"
    r"|'(?!NoneType|DataFrame|Series|Namespace|Tensor|Parameter|Dataset)[A-Z][a-z]\w+' object "
    r"has no attribute"
)
# source lines that read values from a checkpoint
KEYS = re.compile(r"(?i)load_state_dict\(|\b\w*(?:checkpoint|ckpt|state_dict)\w*\[")
# Argument checks in torch and numpy. The catalogues cover their other failures.
CALLED = re.compile(
    r"/(?:site|dist)-packages/(?:torch/(?:functional|_tensor\.py|autograd|optim|amp|linalg|fft|nn/(?!parallel))|numpy/|einops/)"
)
# Causes with broad patterns such as "timed out" and "not found", which match many failures.
WIDE = ("storage", "data")
# Exceptions that count as the program's own if its code is the innermost frame.
RAISED = ("Exception", "RuntimeError", "ValueError")
TELLING = {"unknown": 0, "code": 1}  # causes of last resort, in ascending order of preference
# Exceptions that only a bug in the source code can cause.
SLIPS = ("NameError", "UnboundLocalError", "RecursionError")


def errors(writer: Writer, stream: ProcessLines) -> Iterator[Evidence]:
    """Yields the most likely root cause of each exception chain in a process's output."""
    for chain in stream.tracebacks.chains:
        causes = [_error(writer, block, block is chain[0]) for block in chain]
        if found := max(
            causes,
            key=lambda one: (not one.guessed, one.weight, one.firm, TELLING.get(one.cause, 2)),
            default=None,
        ):
            yield found


def _error(writer: Writer, block: PrintedException, root: bool) -> Evidence:
    line, text = block.line, numbered(stated(block.text))
    by = ("error", "library", "any") if line.who == "rank" else ("error", "library", "any", "agent")
    if last := _LAST.search(text):  # the NCCL warning that the exception quotes
        text = f"{text[: last.start()]}\nNCCL WARN {last[1]}"
    where = first_sign(("frame",), block.where)
    if sign := _sign(block, text, by, where):
        return _named(sign, writer, block, by)
    weight = Weight.WORD if where or not (block.bare or block.aside) else Weight.HINT
    said = block.message[0]
    blank = Evidence(weight, "unknown", line, writer, block.index, writer[1], said, True, False)
    if where:
        return replace(blank, cause=where[0].cause)
    return replace(_guess(blank, block, text, root), guessed=True)


def _sign(
    block: PrintedException, text: str, by: tuple[str, ...], where: Found | None
) -> Found | None:
    """Returns the pattern that an exception's message matches, unless the pattern is broad and the
    class or the frame tells more.
    """
    sign = firmer(first_sign(by, stated(block.inner)), first_sign(by, text))
    if block.bare:
        sign = heavier(sign, implied(block.text, by))
    if sign is None or sign[0].firm:
        return sign
    vague = where and sign[0].cause in WIDE and "[Errno " not in text
    return None if vague or block.name in BUGS else sign


def _named(sign: Found, writer: Writer, block: PrintedException, by: tuple[str, ...]) -> Evidence:
    """Creates evidence from the pattern that an exception matches."""
    # The pattern may require the prefix that the exception's quote lacks.
    lines = (one for one in block.message if sign[0].search(f"{one}\nNCCL WARN {one}"))
    said = next(lines, block.message[0])
    found = replace(signed(sign, block.line, writer, block.index, said), error=True)
    if len(firm_causes(by, stated(block.text))) > 1:
        found = replace(found, firm=False, closed=False)
    cause = _handled(found.cause, found.firm, block)
    return replace(found, cause=cause, closed=found.closed and cause == found.cause)


def numbered(text: str) -> str:
    """Adds Python's errno format to errno(3) numbers printed by other languages."""
    return _NUMBER.sub(_number, text)


def _number(match: re.Match[str]) -> str:
    told = match["code"] or match["number"] or getattr(errno, match["name"] or "", None)
    return f"{match[0]} [Errno {told}]" if told else match[0]


def _handled(cause: str, firm: bool, block: PrintedException) -> str:
    """Refines a cause by the operation that failed. A missing file counts as an environment failure
    if it is a program being launched. A data error during a restore counts as a checkpoint failure.
    A failed checkpoint write counts as a disk failure.
    """
    missing = cause in ("data", "disk") and re.search(r"\[Errno (?:2|13)\]", block.text)
    if missing and STARTING.search(f"{block.frames}\n{block.source}"):
        return "environment"
    if cause == "data" and RESTORING.search(block.frames):
        return "checkpoint"
    return "disk" if cause == "checkpoint" and not firm and SAVING.search(block.frames) else cause


def _guess(blank: Evidence, block: PrintedException, text: str, root: bool) -> Evidence:
    """Classifies an exception that matches no catalogue pattern. Blames the program if Python or
    the program's own line raised it, or if it concerns arguments. Otherwise, the cause is unknown.
    """
    if block.panicked:
        return replace(blank, cause="code")
    if block.name == "KeyError" and (KEYS.search(block.source) or "state_dict" in text):
        return replace(blank, cause="checkpoint")
    if block.name in PROGRAM and _misfits(block, text):
        return replace(blank, cause="environment")
    if block.name in PROGRAM:
        firm = blank.weight == Weight.WORD
        return replace(blank, cause="code", firm=firm, closed=firm and block.name in SLIPS)
    if block.name in (*RAISED, "AssertionError") and RESTORING.search(block.frames):
        return replace(blank, cause="checkpoint")
    return replace(blank, cause="code") if _is_own(block, text, root) else blank


def _is_own(block: PrintedException, text: str, root: bool) -> bool:
    """Returns whether the program's own line raised the exception, or it concerns arguments."""
    frame = block.frames.rpartition("\n")[2]
    raised = block.name in RAISED and (CALLED.search(frame) or (root and OWN.match(frame)))
    checked = block.name == "AssertionError" or (block.name == "ValueError" and block.frames)
    return bool(raised or checked or first_sign(("program",), text))


def _misfits(block: PrintedException, text: str) -> bool:
    """Returns whether a library failed because of a dependency's version, or while it was being
    imported.
    """
    frames = block.frames.split("\n")
    importing = sum(frame.endswith(" <module>") for frame in frames) > 1
    return LIBRARY.search(frames[-1]) is not None and (importing or MISFIT.search(text) is not None)
