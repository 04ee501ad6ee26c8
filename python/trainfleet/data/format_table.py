"""Lists the file formats that are read: one row per format, the same in folders, buckets and
archives.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import PurePosixPath
from typing import NamedTuple

from ..trust.untrusted_input import printable, shortened

PYTHON, JSON = ".py", ".json"
TEXT = (".txt", ".md", PYTHON)
PLAIN, PACKED_TEXT, TAR = "text", "packed text", "tar"  # names of rows
TEXTS = (PLAIN, PACKED_TEXT)
INSTALLED = ("site-packages", "dist-packages", "__pycache__")  # folders
SIDECAR = re.compile(  # the name of a file that describes the records next to it
    r".*\.md|(readme|licen[cs]e|copying|notice|citation|change(log|s))\b.*\.txt|dataset_(infos?|dict)\.json|state\.json",
    re.IGNORECASE,
)


class Format(NamedTuple):
    """A format of files with these endings; of several that fit, the longest ending counts.

    `read`, by dotted name, takes a SourcePiece and data.text_field, and yields an Item of
    formats.py per record. `divided`: a file may be cut at any byte, and a record belongs to the
    piece with its first byte. `cut`: a long file is one text that is cut into documents. `by_jq`:
    its records are JSON that jq reads.
    """

    name: str
    suffixes: tuple[str, ...]
    read: str
    divided: bool = False
    cut: bool = False
    by_jq: bool = False


_HERE = "trainfleet.data"
FORMATS = {
    row.name: row
    for row in (
        Format(PLAIN, TEXT, f"{_HERE}.documents:read_plain", cut=True),
        Format("lines", (".jsonl",), f"{_HERE}.formats:read_json_lines", divided=True, by_jq=True),
        Format(
            "packed lines",
            (".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".zst"),
            f"{_HERE}.formats:read_packed_lines",
            by_jq=True,
        ),
        Format("parquet", (".parquet",), f"{_HERE}.formats:read_parquet", divided=True),
        Format("json", (JSON,), f"{_HERE}.tables:read_json", by_jq=True),
        Format("separated", (".csv", ".tsv", ".tab"), f"{_HERE}.tables:read_separated"),
        Format("arrow", (".arrow", ".feather"), f"{_HERE}.tables:read_arrow"),
        Format(TAR, (".tar", ".tar.gz", ".tgz"), f"{_HERE}.archives:read_tar"),
        Format(
            PACKED_TEXT,
            tuple(f"{text}{packed}" for text in TEXT for packed in (".gz", ".zst")),
            f"{_HERE}.archives:read_packed_text",
        ),
    )
}


@cache
def by_suffix() -> dict[str, Format]:
    """Returns the format of each ending, the longest first."""
    found = {suffix: row for row in FORMATS.values() for suffix in row.suffixes}
    return dict(sorted(found.items(), key=lambda entry: -len(entry[0])))


def format_of(path: str) -> Format | None:
    """Returns the format of a file by its ending; None if it is not read."""
    return next((row for suffix, row in by_suffix().items() if path.endswith(suffix)), None)


def name_of(path: str) -> str:
    """Returns the name of a file's format; "" if it is not read."""
    row = format_of(path)
    return row.name if row else ""


def is_sidecar(path: str) -> bool:
    """Tells whether a file only describes records, if its source or archive has any."""
    return SIDECAR.fullmatch(re.split("/|: ", path)[-1]) is not None


def is_record(path: str) -> bool:
    """Tells whether a file has records: it is not a text or a sidecar."""
    return name_of(path) not in ("", *TEXTS) and not is_sidecar(path)


def passed_over(path: str) -> str:
    """Returns why a file or folder is skipped with everything below it; "" if it is not."""
    parts = path.split("/")
    # also ._name, which macOS writes next to each file
    if any(part.startswith(".") and part.strip(".") for part in parts):
        return "hidden"
    return next((part for part in parts if part in INSTALLED), "")


def why_unread(path: str) -> str:
    """Returns why a file below a folder, or in an archive, is not read; "" if it is."""
    if why := passed_over(path):
        return why
    return (
        ""
        if name_of(path)
        else shortened(printable(PurePosixPath(path).suffix), 20) or "without a suffix"
    )
