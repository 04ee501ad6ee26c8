"""Variables reach the program as raw text, through a real make."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainfleet.cli.variables import flag, read_variables
from trainfleet.errors import ConfigError

ROOT = Path(__file__).parents[2]
ALLOWED = ("NODES", "CONFIG", "SET", "PROMPT")
PROBE = "import json, os; from trainfleet.cli.variables import read_variables as r; print(json.dumps(r('v', {allowed!r}, [])))"


def through_make(tmp_path: Path, *words: str) -> dict[str, str]:
    """What a recipe's Python reads when make was called with these words, under our Makefile's own head."""
    head = "\n".join(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(("$(foreach", "override")))
    (tmp_path / "probe.py").write_text(PROBE.format(allowed=ALLOWED))
    (tmp_path / "Makefile").write_text(f"{head}\nprobe:\n\t@{sys.executable} probe.py\n")
    (tmp_path / "python").symlink_to(ROOT / "python")
    done = subprocess.run(["make", "-s", "probe", *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "value",
    [
        "4",
        "4; touch evil",
        "$(shell touch evil)",
        "`touch evil`",
        "a  b\tc",
        "line\nline",
        'it\'s "quoted"',
        "back\\slash $HOME $$",
        "é ✓",
        "-- X=1",
    ],
)
def test_a_value_comes_through_make_as_it_was_typed_and_nothing_runs(tmp_path: Path, value: str) -> None:
    assert through_make(tmp_path, f"PROMPT={value}", "NODES=2") == {"PROMPT": value, "NODES": "2"}
    assert not (tmp_path / "evil").exists()


def test_a_misspelt_variable_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"NODE: unknown variable; did you mean NODES\?"):
        read_variables("train", ALLOWED, [], {"MAKEFLAGS": " -- NODE=4"})


def test_a_variable_of_another_verb_is_refused() -> None:
    with pytest.raises(ConfigError, match="make train does not take PURGE"):
        read_variables("train", ALLOWED, ["PURGE=1"], {})


def test_words_win_over_make_and_make_over_the_environment() -> None:
    environment = {"NODES": "1", "CONFIG": "env.yaml", "SET": "", "MAKEFLAGS": "s -j2 -- NODES=2 SET=a=1\\ b=2"}
    assert read_variables("train", ALLOWED, ["NODES=3"], environment) == {"NODES": "3", "CONFIG": "env.yaml", "SET": "a=1 b=2"}


def test_a_flag_is_on_off_or_refused() -> None:
    assert flag({"YES": "1"}, "YES") and not flag({"YES": "0"}, "YES") and not flag({}, "YES")
    with pytest.raises(ConfigError, match="must be 1 or 0, not 'maybe'"):
        flag({"YES": "maybe"}, "YES")
