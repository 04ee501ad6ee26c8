"""What a reader would type and write, as the pages say it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALL = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("docs/**/*.md")])
PARTS = {"name": "name: part\n", "data": "data: {sources: [stdlib]}\n"}  # what every config has
EVIDENCE = ROOT / "docs/evidence/README.md"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """The commands of its shell blocks, in order, one each, without the comments beside them."""
    lines = [re.sub(r"(^|\s)#.*", "", line) for block in blocks(page, "sh") for line in block.splitlines()]
    return [command.strip() for line in lines for command in line.split("&&") if command.strip()]


def mentioned(page: Path) -> list[str]:
    """The commands within its sentences and tables."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall("`((?:make|trainfleet) [a-z][^`]*)`", text)


def configs() -> list[tuple[str, str]]:
    """The configs that pages show, each with its page; a part of one gets a name and data."""
    return [(str(page.relative_to(ROOT)), completed(block)) for page in ALL for block in blocks(page, "yaml")]


def completed(block: str) -> str:
    lacking = {name: line for name, line in PARTS.items() if not re.search(f"^{name}:", block, flags=re.MULTILINE)}
    return block + "".join(lacking.values())


def name_of(config: str) -> str:
    """The page that shows a config, and the backend in it."""
    page = next(page for page, text in configs() if text == config)
    backend = re.search(r"backend: (\w+)", config)
    return f"{page} {backend[1] if backend else 'local'}"
