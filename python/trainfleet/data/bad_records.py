"""What is wrong with a record, in words and with a remedy that works; and the bad records of a unit
that are skipped.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..trust.errors import DataError
from ..trust.untrusted_input import converting, mistaken, printable, shortened, show
from .format_table import format_of
from .sources import LARGEST_TEXT

STOP, SKIP = "stop", "skip"  # data.bad_records, which may also be the largest share that is skipped
SHARE = 1e-4  # of the records that `skip` skips at most
LISTED = 100  # bad records of a unit that its record names
# bad records of a unit, and more than half of it, which is a wrong file or key and not a bad record
HOPELESS = 100
SHOWN = 400  # characters, of a table's own words
ELSE = ", or skip such records: SET='data.bad_records=skip'"
LINE = f"correct or remove the line{ELSE}"
# names of a field that has text
COMMON = ("text", "content", "body", "document", "raw_content", "code")
CHATS = ("messages", "conversations")  # fields of a chat's turns
TURNS = (("role", "content"), ("from", "value"))  # who says what in them
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("question", "answer"),
)
NO_SFT = (
    "instruction tuning (chat templates, losses on answers alone) is not here; to train on "
    "it as plain text"
)


class BadText(DataError):
    """A text that is not UTF-8."""


class OtherField(DataError):
    """A record has no text in the field of that name, and may have some in another."""


def alone(error: DataError) -> DataError:
    """The error for a bad record of a file that has good ones: another field would be none of
    theirs.
    """
    return (
        DataError(error.what, where=error.where, why=error.why, next=LINE)
        if isinstance(error, OtherField)
        else error
    )


@dataclass
class Skipped:
    """What of one unit is not read: bad records, if they don't `stop` all, the first of them
    listed; and files in archives.
    """

    stop: bool = False
    count: int = 0
    listed: list[str] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)

    def add(self, error: DataError) -> None:
        self.count += 1
        if len(self.listed) < LISTED:
            self.listed.append(
                shortened(
                    printable(f"{error.head}: {error.why}" if error.why else error.head), SHOWN
                )
            )

    def require_few(self, documents: int) -> None:
        """DataError where most records of a unit are bad."""
        if self.count >= HOPELESS and self.count > documents:
            what = f"{self.count:,} records of one unit can't be read, and {documents:,} can"
            why, then = f"the first: {self.listed[0]}", "correct data.sources or data.text_field"
            raise DataError(what, where="data.sources", why=why, next=then)


def share_of(bad_records: str | float) -> float:
    """The largest share of records that data.bad_records lets be skipped."""
    return SHARE if bad_records == SKIP else 0.0 if bad_records == STOP else float(bad_records)


def most(bad_records: str | float, records: int) -> int:
    """How many of so many records may be skipped: a share of them, rounded up."""
    return int(-(-share_of(bad_records) * records // 1))


def lacks_field(
    where: str, text_field: str, names: Sequence[str], readable: Sequence[str]
) -> DataError:
    """`readable`: those of the fields that have text."""
    why = f"it has {shortened(printable(', '.join(names)), SHOWN) or 'no field'}"
    remedy = flattening(where, names) or naming(names, readable)
    return OtherField(f"lacks the field `{text_field}`", where=where, why=why, next=remedy)


def not_text(where: str, text_field: str, record: Mapping[str, object]) -> DataError:
    """What is wrong with a record that has something else in its text field."""
    others = texts_in(record)
    remedy = flattening(where, [text_field]) or (naming(list(record), others) if others else LINE)
    return OtherField(
        f"`{text_field}` is {show(record[text_field])}, not a string", where=where, next=remedy
    )


def texts_in(record: Mapping[str, object]) -> list[str]:
    """The fields of a record that have text."""
    return [name for name, value in record.items() if isinstance(value, str)]


def naming(names: Sequence[str], readable: Sequence[str]) -> str:
    """The variable that names another field: the one that mostly has the text, or the first that
    has some.
    """
    others = [name for name in readable if re.fullmatch(r"\w[\w.-]{0,62}", name)]
    best = next((name for name in COMMON if name in others), others[0] if others else "")
    if best:
        return f"SET='data.text_field={best}' takes that one"
    return "name a source whose records have a field of text"


def flattening(where: str, names: Sequence[str]) -> str:
    """How records that are chats, or prompts with answers, become plain text; "" for others."""
    chat = next((name for name in CHATS if name in names), None)
    pair = next((pair for pair in PAIRS if set(pair) <= set(names)), None)
    if chat:
        who, says = ((f".{a} // .{b}") for a, b in zip(*TURNS, strict=True))
        text = f'[.{chat}[] | "\\({who}): \\({says})"] | join("\\n\\n")'
    elif pair:
        text = f'.{pair[0]} + "\\n\\n" + .{pair[1]}'
    else:
        return ""
    form, entry = f"{{text: ({text})}}", ": entry " in where
    file = shlex.quote(re.sub(r":[0-9]+$|: entry [0-9]+$", "", where))
    # in an archive, where jq can't look
    if (row := format_of(file.strip("'"))) is None or not row.by_jq or ": " in file:
        return f"{NO_SFT}: write what each record says into one field of text"
    unpack = "gzip -dc" if ".gz" in file[-4:] else "zstd -dc" if ".zst" in file[-5:] else "cat"
    command = (
        f"{unpack} {file} | jq -c {shlex.quote(f'.[] | {form}' if entry else form)} > flat.jsonl"
    )
    return f"{NO_SFT}: with jq installed, {command}; then SET='data.sources=[flat.jsonl]'"


def bad_line(where: str, line: bytes, text_field: str, error: Exception) -> DataError:
    """What is wrong with a line of JSON that could not be read for `error`."""
    if isinstance(error, UnicodeDecodeError):
        return not_utf8(where, error, 0)
    if isinstance(error, UnicodeEncodeError):
        return half_a_pair(text_field, where, error)
    if isinstance(error, json.JSONDecodeError):
        if other := mistaken(line.decode("utf-8", "replace"), where):
            return DataError(other.what, where=where, next="get the file again")
        whole = line.strip() in (b"[", b"{")  # the first line of one JSON text over several
        return DataError(
            "is no JSON",
            where=where,
            why=error.args[0],
            next="call the file .json: it is one" if whole else LINE,
        )
    if isinstance(error, RecursionError):
        return DataError("is nested too deeply", where=where, next=LINE)
    # thousands of digits
    return DataError(
        "can't be read as JSON", where=where, why=str(error).partition(";")[0], next=LINE
    )


def half_a_pair(text_field: str, where: str, error: UnicodeEncodeError) -> DataError:
    why = f"{error.reason}, at character {error.start}"
    return DataError(
        f"`{text_field}` holds half of a surrogate pair", where=where, why=why, next=LINE
    )


def too_long(where: str) -> DataError:
    why = f"it has more than {LARGEST_TEXT / 2**20:.0f} MiB, and a record is read whole"
    remedy = (
        "cut it into several; or put the text into a .txt file outside of an archive, which "
        "is cut at blank lines"
    )
    return DataError("is too long for one document", where=where, why=why, next=remedy)


def not_utf8(where: str, error: UnicodeDecodeError, offset: int) -> BadText:
    why = f"{error.reason} {error.object[error.start]:#04x} at byte {offset + error.start}"
    return BadText(
        "is not UTF-8", where=where, why=why, next=f"{converting(error.object, error.start)}{ELSE}"
    )
