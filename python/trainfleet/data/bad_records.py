"""Errors for bad records, each with a suggested fix, and counts of the records that a unit
skips.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..config.types_train import CHAT
from ..trust.errors import DataError
from ..trust.untrusted_input import converting, mistaken, printable, shortened, show
from .format_table import format_of
from .sources import LARGEST_TEXT

# Named values of data.on_bad_record. A number sets the maximum fraction of bad records to skip.
STOP, SKIP = "stop", "skip"
SHARE = 1e-4  # maximum fraction of bad records that `skip` allows
LISTED = 100  # maximum bad records listed in a unit's record
# A unit fails if it has at least this many bad records and they outnumber the good ones. The usual
# cause is a wrong file or text field.
HOPELESS = 100
SHOWN = 400  # maximum characters of an error message or of a list of field names
ELSE = ", or skip such records: SET='data.on_bad_record=skip'"
LINE = f"correct or remove the line{ELSE}"
# Common names of the text field
COMMON = ("text", "content", "body", "document", "raw_content", "code")
FORMS = (["messages"], ["prompt", "completion"])  # fields of a conversation
PAIRS = (("prompt", "response"), ("instruction", "output"), ("question", "answer"))
SHAREGPT = (
    '{messages: [.conversations[] | {role: ({human: "user", gpt: "assistant"}[.from] // .from), '
    "content: .value}]}"
)


class BadText(DataError):
    """Raised if a text is not valid UTF-8."""


class OtherField(DataError):
    """Raised if a record has no text in the configured field but may have text in another one."""


def alone(error: DataError) -> DataError:
    """Drops the advice to use another text field, because the file's good records rule it out."""
    return (
        DataError(error.what, where=error.where, why=error.why, next=LINE)
        if isinstance(error, OtherField)
        else error
    )


@dataclass
class Skipped:
    """Bad records and unread archive members that a unit has skipped. If `stop` is set, the first
    bad record ends the job.
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
        """Raises DataError if there are at least HOPELESS bad records and they outnumber the good
        ones. `documents` is the number of good records.
        """
        if self.count >= HOPELESS and self.count > documents:
            what = f"one unit has {self.count:,} bad records and only {documents:,} good ones"
            why, then = (
                f"first bad record: {self.listed[0]}",
                "correct data.sources or data.text_field",
            )
            raise DataError(what, where="data.sources", why=why, next=then)


def share_of(bad_records: str | float) -> float:
    """Returns the maximum fraction of bad records that data.on_bad_record allows."""
    return SHARE if bad_records == SKIP else 0.0 if bad_records == STOP else float(bad_records)


def most(bad_records: str | float, records: int) -> int:
    """Returns how many of `records` records may be bad, rounded up."""
    return int(-(-share_of(bad_records) * records // 1))


def lacks_field(
    where: str, text_field: str, names: Sequence[str], readable: Sequence[str]
) -> DataError:
    """Builds the error for a record that lacks the text field. `readable` lists the record's fields
    that contain text.
    """
    why = f"its fields: {shortened(printable(', '.join(names)), SHOWN) or 'none'}"
    others = LINE if text_field == CHAT else naming(names, readable)
    remedy = on_conversations(where, names) or others
    return OtherField(f"lacks the field `{text_field}`", where=where, why=why, next=remedy)


def not_text(where: str, text_field: str, record: Mapping[str, object]) -> DataError:
    """Builds the error for a record in which the text field is not a string."""
    others = texts_in(record)
    remedy = on_conversations(where, [text_field]) or (
        naming(list(record), others) if others else LINE
    )
    return OtherField(
        f"`{text_field}` is {show(record[text_field])}, not a string", where=where, next=remedy
    )


def texts_in(record: Mapping[str, object]) -> list[str]:
    """Returns the names of all string fields."""
    return [name for name, value in record.items() if isinstance(value, str)]


def naming(names: Sequence[str], readable: Sequence[str]) -> str:
    """Suggests a SET= argument that selects another text field, preferably one with a common
    name.
    """
    others = [name for name in readable if re.fullmatch(r"\w[\w.-]{0,62}", name)]
    best = next((name for name in COMMON if name in others), others[0] if others else "")
    if best:
        return f"add SET='data.text_field={best}'"
    return "set data.sources to files with a text field in each record"


def chat_fields(names: Collection[str]) -> list[str]:
    """Returns the fields that contain a conversation, or [] if the names lack one."""
    return next((form for form in FORMS if all(name in names for name in form)), [])


def on_conversations(where: str, names: Sequence[str]) -> str:
    """Suggests training on conversations if records contain them.

    Includes a jq command if fields must be renamed and jq can read the file. Returns "" for other
    records.
    """
    pair = next((pair for pair in PAIRS if set(pair) <= set(names)), None)
    if chat_fields(names):
        return "train on conversations: add SET='data.conversations=true'"
    if "conversations" in names:
        form = SHAREGPT
    elif pair:
        more = 'if (.input // "") == "" then "" else "\\n\\n" + .input end'
        form = f"{{prompt: (.{pair[0]} + {more}), completion: .{pair[1]}}}"
    else:
        return ""
    entry = ": entry " in where
    file = shlex.quote(re.sub(r":[0-9]+$|: entry [0-9]+$", "", where))
    # jq can't read this format, or the file is inside an archive.
    if (row := format_of(file.strip("'"))) is None or not row.by_jq or ": " in file:
        return f"write {' or '.join(map(' and '.join, FORMS))} and set data.conversations"
    unpack = "gzip -dc" if ".gz" in file[-4:] else "zstd -dc" if ".zst" in file[-5:] else "cat"
    command = (
        f"{unpack} {file} | jq -c {shlex.quote(f'.[] | {form}' if entry else form)} > chat.jsonl"
    )
    return (
        f"train on conversations: with jq installed, run {command}; then add "
        "SET='data.sources=[chat.jsonl] data.conversations=true'"
    )


def bad_line(where: str, line: bytes, text_field: str, error: Exception) -> DataError:
    """Builds the error for a line that is not valid JSON. `error` is the parser's exception."""
    if isinstance(error, UnicodeDecodeError):
        return not_utf8(where, error, 0)
    if isinstance(error, UnicodeEncodeError):
        return half_a_pair(text_field, where, error)
    if isinstance(error, json.JSONDecodeError):
        if other := mistaken(line.decode("utf-8", "replace"), where):
            return DataError(other.what, where=where, next="download the file again")
        whole = line.strip() in (b"[", b"{")  # start of a multi-line JSON value
        return DataError(
            "is not valid JSON",
            where=where,
            why=error.args[0],
            next="rename the file to .json; its JSON value spans several lines" if whole else LINE,
        )
    if isinstance(error, RecursionError):
        return DataError("is nested too deeply", where=where, next=LINE)
    # Python refuses to parse integers with thousands of digits.
    return DataError(
        "can't be parsed as JSON", where=where, why=str(error).partition(";")[0], next=LINE
    )


def half_a_pair(text_field: str, where: str, error: UnicodeEncodeError) -> DataError:
    why = f"{error.reason}, at character {error.start}"
    return DataError(
        f"`{text_field}` contains half of a surrogate pair", where=where, why=why, next=LINE
    )


def too_long(where: str) -> DataError:
    why = f"it is larger than {LARGEST_TEXT / 2**20:.0f} MiB, the limit for one record"
    remedy = (
        "split it into several records, or move the text to a .txt file outside an archive, "
        "which is cut at blank lines"
    )
    return DataError("is too long for one document", where=where, why=why, next=remedy)


def not_utf8(where: str, error: UnicodeDecodeError, offset: int) -> BadText:
    why = f"{error.reason} {error.object[error.start]:#04x} at byte {offset + error.start}"
    return BadText(
        "is not valid UTF-8",
        where=where,
        why=why,
        next=f"{converting(error.object, error.start)}{ELSE}",
    )
