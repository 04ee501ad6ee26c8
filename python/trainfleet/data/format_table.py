"""Table of supported file formats, which are the same for folders, buckets and archives."""

from __future__ import annotations

import re
from functools import cache
from pathlib import PurePosixPath
from typing import NamedTuple

from ..trust.untrusted_input import printable, shortened

PYTHON, JSON = ".py", ".json"
TEXT = (".txt", ".md", PYTHON)
PLAIN, PACKED_TEXT, TAR = "text", "packed text", "tar"  # format names
TEXTS = (PLAIN, PACKED_TEXT)
# Folders of installed packages and caches, which are skipped
INSTALLED = ("site-packages", "dist-packages", "__pycache__")
SIDECAR = re.compile(  # names of sidecars, which describe the records next to them
    r".*\.md|(readme|licen[cs]e|copying|notice|citation|change(log|s))\b.*\.txt|dataset_(infos?|dict)\.json|state\.json",
    re.IGNORECASE,
)


class Format(NamedTuple):
    """File format and its suffixes. If several suffixes match, the longest one wins.

    Attributes:
        read: Dotted name of a function that takes a SourcePiece and data.text_field, and yields one
            formats.Item per record.
        divided: Whether the file can be split at any byte. A record belongs to the piece that
            contains its first byte.
        cut: Whether a long file is a single text to be cut into documents.
        by_jq: Whether jq can read the records.
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
    """Maps each suffix to its format, longest suffix first."""
    found = {suffix: row for row in FORMATS.values() for suffix in row.suffixes}
    return dict(sorted(found.items(), key=lambda entry: -len(entry[0])))


def format_of(path: str) -> Format | None:
    """Returns a file's format, as determined by its suffix, or None if the format is not
    supported.
    """
    return next((row for suffix, row in by_suffix().items() if path.endswith(suffix)), None)


def name_of(path: str) -> str:
    """Returns the name of a file's format, or "" if the format is not supported."""
    row = format_of(path)
    return row.name if row else ""


def is_sidecar(path: str) -> bool:
    """Returns whether a file is a sidecar, such as README.md, according to its name. A sidecar only
    describes the records next to it.
    """
    return SIDECAR.fullmatch(re.split("/|: ", path)[-1]) is not None


def is_record(path: str) -> bool:
    """Returns whether a file contains records, unlike plain texts and sidecars."""
    return name_of(path) not in ("", *TEXTS) and not is_sidecar(path)


def passed_over(path: str) -> str:
    """Returns why a file, or a folder with all its content, is skipped, or "" if it is not."""
    parts = path.split("/")
    # This includes ._name files, which macOS creates next to each file.
    if any(part.startswith(".") and part.strip(".") for part in parts):
        return "hidden"
    return next((part for part in parts if part in INSTALLED), "")


def why_unread(path: str) -> str:
    """Returns why a file in a folder or archive is not read, or "" if it is."""
    if why := passed_over(path):
        return why
    return (
        ""
        if name_of(path)
        else shortened(printable(PurePosixPath(path).suffix), 20) or "without a suffix"
    )
