"""What a reader would type and write, as the pages say it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALL = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("docs/**/*.md")])
EVIDENCE = ROOT / "docs/evidence/README.md"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """The commands of its shell blocks, in order, one each, without the comments beside them."""
    lines = [re.sub(r"(^|\s)#.*", "", line) for block in blocks(page, "sh") for line in block.splitlines()]
    return [command.strip() for line in lines for command in line.split("&&") if command.strip()]


def configs() -> list[tuple[str, str]]:
    """The whole configs that pages show, each with its page: those that have a name and data."""
    found = [(str(page.relative_to(ROOT)), block) for page in ALL for block in blocks(page, "yaml")]
    return [(page, block) for page, block in found if re.search("^name:", block, flags=re.MULTILINE)]


def name_of(config: str) -> str:
    """The page that shows a config, and the backend in it."""
    page = next(page for page, text in configs() if text == config)
    backend = re.search(r"backend: (\w+)", config)
    return f"{page} {backend[1] if backend else 'local'}"
