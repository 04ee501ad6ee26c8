"""The rules of scripts/prose.yaml: each finds the text that it must find, and not the better one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("prose", ROOT / "scripts/prose.py")
assert SPEC and SPEC.loader
prose = importlib.util.module_from_spec(SPEC)
sys.modules["prose"] = prose  # its dataclass looks there
SPEC.loader.exec_module(prose)


@pytest.mark.parametrize("rule", prose.RULES["rules"], ids=lambda rule: rule["bad"])
def test_a_rule_finds_its_example_and_not_the_better_text(rule: dict[str, Any]) -> None:
    kind = "docstring" if rule.get("docstrings") else "message"
    found = {
        words: [*prose.finds(prose.Text(Path("x"), 1, kind, words), [rule])]
        for words in (rule["bad"], rule["good"])
    }
    assert found[rule["bad"]] and not found[rule["good"]]


def test_a_long_sentence_is_found_and_code_is_not_read(tmp_path: Path) -> None:
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text(
        f"# A page\n\n```\nit goes on\n```\n\n{'word ' * 36}.\n\nRun `it goes on` again.\n"
    )
    module.write_text(
        '"""Reads a file."""\n\nx = f"the run {1} goes on for ever"  # this stands here\n'
    )
    assert [find[:9] for text in prose.of_page(page) for find in prose.finds(text)] == ["a sentenc"]
    assert [text.kind for text in prose.of_module(module) for _ in prose.finds(text)] == [
        "comment",
        "message",
    ]
