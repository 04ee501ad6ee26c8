"""What a reader would type and write, as the pages say it; `python tests/pages.py` writes what pages have of the program's tables."""

from __future__ import annotations

import html
import re
from pathlib import Path

from trainfleet.cli import VERBS
from trainfleet.cli.variables import SWITCHES, VARIABLES, option_of
from trainfleet.watch.causes import CAUSES

ROOT = Path(__file__).parents[1]
ALL = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("docs/**/*.md")]
)
PARTS = {"name": "name: part\n", "data": "data: {sources: [stdlib]}\n"}  # what every config has
WIDTH = 12.2  # of a letter in such a picture
BEGIN, END = "<!-- made by tests/pages.py -->\n", "<!-- end -->\n"
EVIDENCE = ROOT / "docs/evidence/README.md"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of that language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )


def commands(page: Path) -> list[str]:
    """The commands of its shell blocks, in order, one each, without the comments beside them."""
    lines = [
        re.sub(r"(^|\s)#.*", "", line)
        for block in blocks(page, "sh")
        for line in block.splitlines()
    ]
    return [command.strip() for line in lines for command in line.split("&&") if command.strip()]


def mentioned(page: Path) -> list[str]:
    """The commands within its sentences and tables."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall("`((?:make|trainfleet) [a-z][^`]*)`", text)


def drawn(image: Path) -> list[str]:
    """The lines of a terminal that docs/terminal.py has drawn, but for empty ones."""
    lines: dict[int, str] = {}
    parts = re.findall(
        r'x="([\d.]+)"[^>]*clip-path="url\(#terminal-line-(\d+)\)">([^<]*)</text>',
        image.read_text(),
    )
    for place, number, text in parts:
        before = lines.get(int(number), "").ljust(round(float(place) / WIDTH))
        lines[int(number)] = before + html.unescape(text).replace("\xa0", " ")
    return [line.rstrip() for _, line in sorted(lines.items()) if line.strip()]


def configs() -> list[tuple[str, str]]:
    """The configs that pages show, each with its page; a part of one gets a name and data."""
    return [
        (str(page.relative_to(ROOT)), completed(block))
        for page in ALL
        for block in blocks(page, "yaml")
    ]


def completed(block: str) -> str:
    lacking = {
        name: line
        for name, line in PARTS.items()
        if not re.search(f"^{name}:", block, flags=re.MULTILINE)
    }
    return block + "".join(lacking.values())


def name_of(config: str) -> str:
    """The page that shows a config, and the backend in it."""
    page = next(page for page, text in configs() if text == config)
    backend = re.search(r"backend: (\w+)", config)
    return f"{page} {backend[1] if backend else 'local'}"


def tables() -> dict[Path, list[str]]:
    """The rows of the program's own tables, by the page that shows them between the two marks."""
    used = {name: [verb for verb, takes in VERBS.items() if name in takes] for name in VARIABLES}
    most = len(used["CONFIG"]) / 2  # verbs; more are not listed
    variables = [
        f"| `{name}` | `{option_of(name)}{'' if name in SWITCHES else ' …'}` | {VARIABLES[name]} | "
        f"{', '.join(verbs) if len(verbs) < most else 'most'} |"
        for name, verbs in used.items()
        if verbs
    ]
    causes = [f"| `{name}` | {cause.words} | {cause.next} |" for name, cause in CAUSES.items()]
    return {
        ROOT / "docs/reference/verbs.md": variables,
        ROOT / "docs/how-to/troubleshooting.md": causes,
    }


def written(page: Path, rows: list[str]) -> str:
    """The page with these rows below the head of its table."""
    head, _, rest = page.read_text().partition(BEGIN)
    title, line, *_ = rest.strip().splitlines()
    return "".join(
        [head, BEGIN, "\n".join(["", title, line, *rows, "", ""]), END, rest.partition(END)[2]]
    )


if __name__ == "__main__":
    for page, rows in tables().items():
        page.write_text(written(page, rows))
