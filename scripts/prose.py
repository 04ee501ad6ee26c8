"""Lints prose in Markdown, docstrings, comments and messages with the rules of prose.yaml, and
limits the length of sentences. Usage: prose.py [--count] [PATH ...]. Exits with 1 on any finding.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

RULES = yaml.safe_load((Path(__file__).parent / "prose.yaml").read_text(encoding="utf-8"))
WHERE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs", "python")
CODE = re.compile(r"``.*?``|`[^`]*`|\]\([^)]*\)|https?://\S+")
FEW = 3  # strings with at most this many words are not prose


@dataclass(frozen=True)
class Text:
    """A piece of prose, with its file, line and kind: page, docstring, comment or message."""

    path: Path
    line: int
    kind: str
    words: str


def of_page(path: Path) -> Iterator[Text]:
    """Yields the paragraphs, list items and table cells of a Markdown page, without its code."""
    fenced, begun, lines = False, 1, list[str]()
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        ends = fence or fenced or not line.strip() or re.match(r"\s*([-*|#]|\d+\.)", line)
        if ends and lines:
            yield Text(path, begun, "page", " ".join(lines))
            lines = []
        if fence or fenced or not line.strip():
            continue
        if line.lstrip().startswith("|"):
            yield from (Text(path, number, "page", cell.strip()) for cell in line.split("|"))
            continue
        begun = begun if lines else number
        lines.append(re.sub(r"^\s*([-*#]+|\d+\.)\s", "", line))


def of_module(path: Path) -> Iterator[Text]:
    """Yields the docstrings, comments and messages of a Python module."""
    source = path.read_text(encoding="utf-8")
    docstrings = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            docstrings.add(id(getattr(first, "value", None)))
            for at, part in enumerate(re.split(r"\n\s*\n", ast.get_docstring(node) or "")):
                if not re.search(r"^\s{2,}\S", part, flags=re.MULTILINE):
                    yield Text(
                        path,
                        first.lineno,
                        "docstring" if not at else "page",
                        " ".join(part.split()),
                    )
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(
            r"#\s*(noqa|fmt|type|!|mypy)", token.string
        ):
            yield Text(path, token.start[0], "comment", token.string.lstrip("# "))
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings | inside:
            words = spoken(node)
            if len(words.split()) > FEW:
                yield Text(path, node.lineno, "message", words)


def spoken(node: ast.Constant | ast.JoinedStr) -> str:
    """Returns a string's text, with X for each formatted value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(
        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "X"
        for part in node.values
    )


def sentences(text: Text) -> list[str]:
    """Returns the text's sentences, without code."""
    return [
        one
        for one in re.split(r"(?<=[.!?:;])\s+", CODE.sub("X", text.words))
        if len(one.split()) > FEW
    ]


def finds(text: Text, rules: list[dict[str, Any]] = RULES["rules"]) -> Iterator[str]:
    """Yields the problems of a text."""
    plain = CODE.sub("X", text.words)
    for rule in rules:
        if rule.get("docstrings") and text.kind != "docstring":
            continue
        for found in re.finditer(
            rule["pattern"], plain, flags=re.IGNORECASE if not rule.get("docstrings") else 0
        ):
            yield f"{found[0]!r}: write {rule['better']}"
    for sentence in sentences(text) if text.kind in ("page", "docstring") else ():
        if (count := len(sentence.split())) > RULES["longest_sentence"]:
            yield f"a sentence of {count} words: {sentence[:60]} ..."


def texts(roots: list[Path]) -> Iterator[Text]:
    """Yields all prose in these files and folders."""
    for root in roots:
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.suffix == ".md":
                yield from of_page(path)
            elif path.suffix == ".py":
                yield from of_module(path)


def main(words: list[str]) -> int:
    found, lengths = 0, list[int]()
    for text in texts(
        [Path(word) for word in words if word != "--count"] or [Path(word) for word in WHERE]
    ):
        if text.kind in ("page", "docstring"):
            lengths += [len(one.split()) for one in sentences(text)]
        for find in finds(text):
            found += 1
            if "--count" not in words:
                print(f"{text.path}:{text.line}: {find}")
    average = sum(lengths) / max(1, len(lengths))
    print(f"{found} finds; {len(lengths)} sentences of {average:.1f} words on average")
    return 1 if found or average > RULES["average_sentence"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
