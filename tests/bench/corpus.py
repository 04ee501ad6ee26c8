"""A corpus of real text from this machine's own files, no text twice: `corpus.py OUT MEGABYTES FOLDER...`

Source files as they are and HTML pages without their tags, in a fixed random order, as OUT/00.jsonl … 15.jsonl with the fields
`id` and `text`. Nothing is copied to make it larger: it ends where the text does.
"""

from __future__ import annotations

import hashlib
import html
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FILES = 16
SUFFIXES = (".py", ".md", ".rst", ".txt", ".c", ".h", ".hpp", ".js", ".pyi", ".html")
MARKUP = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
LONGEST = 200_000


def texts(folders: list[str]) -> Iterator[tuple[str, str]]:
    """Path and text of every file that is real text, each text once."""
    paths = sorted(
        path
        for folder in folders
        for path in Path(folder).rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    )
    random.Random(0).shuffle(paths)
    seen = set[bytes]()
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        text = (
            re.sub(r"\n\s*\n+", "\n\n", html.unescape(MARKUP.sub("", text)))
            if path.suffix == ".html"
            else text
        )
        digest = hashlib.sha1(text.encode()).digest()
        if len(text) > 200 and digest not in seen:
            seen.add(digest)
            yield str(path), text[:LONGEST]


def main(out: Path, megabytes: int, folders: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    files = [open(out / f"{i:02}.jsonl", "w", encoding="utf-8") for i in range(FILES)]  # noqa: SIM115
    size = count = 0
    for path, text in texts(folders):
        files[count % FILES].write(
            json.dumps({"id": path, "text": text}, ensure_ascii=False) + "\n"
        )
        size, count = size + len(text.encode()), count + 1
        if size >= megabytes * 1e6:
            break
    for file in files:
        file.close()
    print(f"{count} texts, {size / 1e6:.1f} MB in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
