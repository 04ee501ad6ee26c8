"""Adds pages from outside docs/ to the site: the README as its home page, and the key reference.

Links to other files in the repository become plain text, because the site has no page for them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# in the repository → in the site
ELSEWHERE = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "schema/README.md": "reference/keys.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages in ELSEWHERE."""
    for source, page in ELSEWHERE.items():
        files.append(
            File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8"))
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the page's links from repository paths to site paths."""
    here = page.file.src_uri
    lies = next((source for source, there in ELSEWHERE.items() if there == here), f"docs/{here}")

    def link(found: re.Match[str]) -> str:
        text, path, heading = found[1], found[2], found[3] or ""
        if re.match("[a-z]+:|#", path) or not path:
            return found[0]
        target = os.path.normpath(os.path.join(os.path.dirname(lies), path))  # noqa: PTH118, PTH120 - not a file on disk
        there = ELSEWHERE.get(
            target, target.removeprefix("docs/") if target.startswith("docs/") else None
        )
        start = os.path.dirname(here) or "."  # noqa: PTH120
        return f"[{text}]({os.path.relpath(there, start)}{heading})" if there else text

    return re.sub(r"\[([^]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)", link, markdown)
