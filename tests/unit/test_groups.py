"""Each test is in `make test` or in one group of drills, and each part of the project has a group that guards it."""

from __future__ import annotations

import subprocess
import tomllib

import pytest

import groups
from groups import GROUPS, ROOT

TESTED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
    "testpaths"
]
WITHOUT = ("gpu",)  # folders of tests that need what no machine of ours has


def within(file: str, words: list[str]) -> bool:
    paths = [word for word in words if word.startswith("tests/")]
    return f"--ignore={file}" not in words and any(
        file == path or file.startswith(f"{path}/") for path in paths
    )


def test_each_file_of_tests_is_run_by_make_test_or_by_one_group() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    for file in files:
        if file.split("/")[1] not in WITHOUT:
            there = [
                name
                for name, group in GROUPS.items()
                if within(file, group.tests) and "thorough" not in group.tests
            ]
            count = len(there) + within(file, TESTED)
            assert count == 1 or (count == 2 and there == ["contract"]), f"{file} is in {there}"
    named = {word for group in GROUPS.values() for word in group.tests if word.startswith("tests/")}
    assert [word for word in named if not (ROOT / word).exists()] == []


def test_each_part_is_guarded_and_no_group_is_long() -> None:
    rooms = {
        path.name
        for path in (ROOT / "python" / "trainfleet").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    guarded = {part for group in GROUPS.values() for part in group.guards}
    assert rooms - {"__pycache__"} <= guarded
    assert [
        part
        for part in guarded - rooms
        if not any((ROOT / there / part).exists() for there in ("", "python", "python/trainfleet"))
    ] == []
    assert all(0 < group.minutes <= 30 for group in GROUPS.values())


def test_the_table_of_contributing_is_that_of_the_groups() -> None:
    assert groups.table() in groups.PAGE.read_text(), "python tests/groups.py table"


def test_a_changed_file_calls_the_groups_that_guard_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "merge-base": ["base"],
        "diff": ["python/trainfleet/watch/follow.py"],
        "ls-files": ["tests/drills/test_soak.py"],
    }
    monkeypatch.setattr(groups, "git", lambda *words: answers[words[0]])
    assert groups.chosen({"CHANGED": "1"}) == [
        name for name, group in GROUPS.items() if "watch" in group.guards or name == "days"
    ]
    assert (
        groups.part_of("python/trainfleet_nxd/shards.py") == "trainfleet_nxd"
        and groups.part_of("docs/a.md") == "docs"
    )


def test_a_group_that_does_not_exist_is_told_with_the_one_that_was_meant() -> None:
    done = subprocess.run(["make", "drills", "ONLY=head"], cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and "error: drills have no group head; did you mean heads?" in done.stderr
    )
    assert "Traceback" not in done.stderr
