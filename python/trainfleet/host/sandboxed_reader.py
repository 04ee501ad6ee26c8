"""Has a child of this process read files of strangers, behind a wall (host/sandbox.py), for a verb that asks what they are.

The child's answer is JSON and is checked as anybody's text: what such a file has done to its reader ends with the child. It is a
fork, which takes 20 ms, where a new interpreter would take 300.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypedDict, TypeVar

from ..trust import untrusted_input
from ..trust.errors import DataError, InputError, NoSource, RunError, S3Error, TrainfleetError
from ..trust.validation import fit
from .processes import die_with_parent

T = TypeVar("T")
KINDS: dict[str, type[TrainfleetError]] = {kind.__name__: kind for kind in (DataError, InputError, RunError, S3Error)}
DEFECT = 70  # sysexits.h: the exit code of a child that raised what no file should make it raise


class CarriedError(TypedDict):
    """An error on its way; `entry` is a NoSource's."""

    error: str
    what: str
    where: str
    why: str
    next: str
    entry: int | None


def ask(reply: Callable[[], object], kind: type[T], where: str) -> T:
    """What `reply` returns in a child, which puts up its wall itself: plain values, or a dataclass of them.

    Raises:
        TrainfleetError: the one that was raised there; DataError about `where` when the child has no answer.
    """
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        _answer(reply, theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb") as stream:
        text = stream.read(untrusted_input.RECORD)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        said = fit(dict[str, Any], untrusted_input.parse_json(untrusted_input.decode(text, where), where))
        if "error" not in said:
            return fit(kind, said.get("answer"))
        refusal = fit(CarriedError, said)
    except InputError as error:
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise DataError("ended its reader", where=where, why=why, next="leave it out, or get it again") from error
    raise _error(refusal)


def _answer(reply: Callable[[], object], pipe: int) -> None:
    """Writes the answer, or the error that was raised, to the pipe, and ends this child."""
    code = DEFECT
    try:
        die_with_parent()
        said = _said(reply)
        with os.fdopen(pipe, "wb") as stream:
            stream.write(json.dumps(said, default=asdict).encode())
        code = 0
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _said(reply: Callable[[], object]) -> dict[str, Any]:
    try:
        return {"answer": reply()}
    except TrainfleetError as error:
        name = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS), DataError.__name__)
        return {"error": name, "what": error.what, "where": error.where, "why": error.why, "next": error.next,
                "entry": error.entry if isinstance(error, NoSource) else None}  # fmt: skip


def _error(refusal: CarriedError) -> TrainfleetError:
    kind = KINDS.get(refusal["error"], DataError)
    found = kind(refusal["what"], where=refusal["where"], why=refusal["why"], next=refusal["next"])
    entry = refusal["entry"]
    return found if entry is None or not isinstance(found, DataError) else NoSource(found, entry)
