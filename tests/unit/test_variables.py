"""Variables reach the program as raw text, through a real make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainfleet.cli import main as command
from trainfleet.cli.variables import amount, flag, number, read_variables
from trainfleet.trust.errors import ConfigError
from trainfleet.trust.safe_output import TYPED, completed

ROOT = Path(__file__).parents[2]
OLD = Path(__file__).parent / "old_checkpoint"
ALLOWED = ("NODES", "CONFIG", "SET", "PROMPT")
PROBE = "import json, os; from trainfleet.cli.variables import read_variables as r; print(json.dumps(r('v', {allowed!r}, [])))"


def through_make(tmp_path: Path, *words: str) -> dict[str, str]:
    """What a recipe's Python reads when make was called with these words, under our Makefile's own head."""
    head = "\n".join(
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith(("$(foreach", "override"))
    )
    (tmp_path / "probe.py").write_text(PROBE.format(allowed=ALLOWED))
    (tmp_path / "Makefile").write_text(f"{head}\nprobe:\n\t@{sys.executable} probe.py\n")
    (tmp_path / "python").symlink_to(ROOT / "python")
    done = subprocess.run(
        ["make", "-s", "probe", *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
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
def test_a_value_comes_through_make_as_it_was_typed_and_nothing_runs(
    tmp_path: Path, value: str
) -> None:
    assert through_make(tmp_path, f"PROMPT={value}", "NODES=2") == {"PROMPT": value, "NODES": "2"}
    assert not (tmp_path / "evil").exists()


def test_a_misspelt_variable_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"NODE: unknown variable; did you mean NODES\?"):
        read_variables("train", ALLOWED, [], {"MAKEFLAGS": " -- NODE=4"})
    with pytest.raises(ConfigError, match=r"nodes: unknown variable; did you mean NODES\?"):
        read_variables("train", ALLOWED, [], {"MAKEFLAGS": " -- nodes=4"})


@pytest.mark.parametrize(
    ("text", "meant"), [("1.5T", "1500000000000"), ("2,000", "2000,"), ("-1", "")]
)
def test_a_number_with_a_unit_is_understood_but_not_used(text: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        amount({"TOKENS": text}, "TOKENS")
    assert ("did you mean" in str(caught.value)) == bool(meant) and meant in str(caught.value)


def test_an_option_and_its_value_are_one_mistake() -> None:
    for words in (["--steps", "5"], ["--steps=5"]):
        with pytest.raises(ConfigError) as caught:
            read_variables("train", ALLOWED, words, {})
        assert len(caught.value.problems) == 1 and "SET='train.steps=5'" in str(caught.value)
    for words in (["--steps", "--lr"], ["5", "--steps"], ["--steps=4", "5"]):
        with pytest.raises(ConfigError) as caught:
            read_variables("train", ALLOWED, words, {})
        assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("--nodes 4", {"NODES": "4"}),
        ("--nodes=4 --yes --prompt def", {"NODES": "4", "YES": "1", "PROMPT": "def"}),
        (
            "--set train.steps=9 --set name=b NODES=2 --nodes 2",
            {"SET": "train.steps=9 name=b", "NODES": "2"},
        ),
    ],
)
def test_an_option_is_its_variable(words: str, read: dict[str, str]) -> None:
    assert read_variables("x", (*ALLOWED, "YES"), words.split(), {}) == read


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nodes", '"--nodes" has no value; set it to the number of nodes (fleet.nodes)'),
        ("--nodes --yes", '"--nodes" has no value; set it to the number of nodes (fleet.nodes)'),
        ("--top-p", '"--top-p" has no value; set it to nucleus sampling'),
        ("--nodes=", "NODES: is empty"),
        ("--nods 4", '"--nods" is not an option; did you mean --nodes?'),
        ("NODES=4 --nodes 8", 'NODES: has two values, "4" and "8"; set one'),
    ],
)
def test_an_option_that_says_nothing_or_otherwise_is_one_line(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_variables("x", (*ALLOWED, "YES", "TOP_P"), words.split(), {})
    assert len(caught.value.problems) == 1 and said in str(caught.value)


def test_a_variable_of_another_verb_is_refused() -> None:
    with pytest.raises(ConfigError, match="make train does not take PURGE"):
        read_variables("train", ALLOWED, ["PURGE=1"], {})


@pytest.mark.parametrize(("words", "kept", "fault"), [
    (["RUN=a", "CONFIG=b.yaml"], {}, "RUN: can't be combined with CONFIG"), (["RUN=a"], {"RUN": "a"}, ""),
    (["CONFIG=b.yaml"], {"CONFIG": "b.yaml"}, ""), ([], {}, "RUN: can't be combined with CONFIG"),
    (["RUN=a", "NODES=2", "SET=fleet.nodes=4"], {}, "NODES: can't be combined with fleet.nodes=,"),
])  # fmt: skip
def test_what_names_a_run_or_a_size_twice_is_refused(
    words: list[str], kept: dict[str, str], fault: str
) -> None:
    """A variable in the environment gives way to one in the command."""
    around = {"RUN": "old", "CONFIG": "old.yaml"}
    try:
        found = read_variables("v", (*ALLOWED, "RUN"), words, around)
    except ConfigError as error:
        assert fault and fault in str(error)
    else:
        assert not fault and found == kept


def test_words_win_over_make_and_make_over_the_environment() -> None:
    environment = {
        "NODES": "1",
        "CONFIG": "env.yaml",
        "SET": "",
        "MAKEFLAGS": "s -j2 -- NODES=2 SET=a=1\\ b=2",
    }
    assert read_variables("train", ALLOWED, ["NODES=3"], environment) == {
        "NODES": "3",
        "CONFIG": "env.yaml",
        "SET": "a=1 b=2",
    }


@pytest.mark.parametrize("name", ["CONFIG", "NODES", "OUT", "STEP"])
@pytest.mark.parametrize("value", ["", " ", "\n"])
def test_an_empty_value_is_refused_by_its_name(name: str, value: str) -> None:
    """As in `make train NODES=$N` where N was never set."""
    with pytest.raises(ConfigError, match=f"{name}: is empty; set it to"):
        read_variables("x", (name,), [f"{name}={value}"], {})


def test_a_text_no_keys_and_a_flag_that_is_off_may_be_empty() -> None:
    assert read_variables("x", ("PROMPT", "SET", "YES"), ["PROMPT=", "SET=", "YES="], {}) == {
        "PROMPT": "",
        "SET": "",
        "YES": "",
    }


def test_a_number_that_is_too_long_is_told_how_long_it_may_be() -> None:
    with pytest.raises(
        ConfigError, match="SEED: must be a whole number of at least 0, with up to 18 digits, not"
    ):
        number({"SEED": "9" * 20}, "SEED", 0)


def test_an_export_onto_what_is_there_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "trainfleet.launch.run_location.run_module", lambda *_: pytest.fail("it was loaded")
    )
    (tmp_path / "file").write_text("mine")
    assert command(["export", "OUT=file"]) == 1
    assert (
        "file: already exists" in capsys.readouterr().err
        and (tmp_path / "file").read_text() == "mine"
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["CONFIG=b c.yaml"], "make train CONFIG='b c.yaml'"),
        (
            ["CONFIG=b.yaml", "SET=name=x train.steps=5"],
            "make train CONFIG=b.yaml SET='name=x train.steps=5'",
        ),
        (["CONFIG=b.yaml", "SET=train.steps=5"], "make train CONFIG=b.yaml SET=train.steps=5\n"),
        ([], "make train\n"),
    ],
)
def test_the_next_command_is_about_the_run_that_was_asked_about(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config.yaml", "b.yaml", "b c.yaml"):
        (tmp_path / name).write_text("name: a\n")
    assert command(["report", *words]) == 1
    assert f"next: {named}" in capsys.readouterr().err and TYPED not in os.environ


def test_commands_about_no_run_and_those_that_name_one_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TYPED, " CONFIG=b.yaml")
    assert (
        completed("run make runs to list them, then make config RECIPE=x")
        == "run make runs to list them, then make config RECIPE=x"
    )
    assert (
        completed("make logs RUN=x") == "make logs RUN=x"
        and completed("make room: df -h") == "make room: df -h"
    )
    assert (
        completed("make logs FOLLOW=1, make stop ends it")
        == "make logs CONFIG=b.yaml FOLLOW=1, make stop CONFIG=b.yaml ends it"
    )


def test_a_proposed_size_replaces_the_one_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TYPED, " SET='train.steps=5 fleet.nodes=4'")
    assert completed("make plan NODES=8") == "make plan SET='train.steps=5 ' NODES=8"
    assert "fleet.nodes=4" in completed("make plan")


def test_a_flag_is_on_off_or_refused() -> None:
    assert flag({"YES": "1"}, "YES") and not flag({"YES": "0"}, "YES") and not flag({}, "YES")
    with pytest.raises(ConfigError, match="must be 1 or 0, not 'maybe'"):
        flag({"YES": "maybe"}, "YES")
    assert flag({"PURGE": "all"}, "PURGE", "all")
    with pytest.raises(ConfigError, match="must be 1, 0 or all, not 'maybe'"):
        flag({"PURGE": "maybe"}, "PURGE", "all")
