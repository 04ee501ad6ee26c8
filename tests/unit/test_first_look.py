"""What a user meets first: make's help, a slip in a verb, a verb too early; on a terminal of 80 columns."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainfleet.cli import VERBS, completion
from trainfleet.plan.job import fold
from trainfleet.process.processes import Interrupts
from trainfleet.recipes import all_recipes
from trainfleet.report.proposal import hung
from trainfleet.run.records import Lines
from trainfleet.run.run_folder import append_line, read_lines

ROOT = Path(__file__).parents[2]


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with our Makefile and default config, whose environment is the one of these tests."""
    for name in ("Makefile", "config.yaml", "python", "schema", "scripts", "requirements.lock"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".venv" / ".stamp").touch()
    return tmp_path


def make(desk: Path, *words: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        ["make", *words],
        cwd=desk,
        text=True,
        capture_output=True,
        check=False,
        env=os.environ | environment,
    )
    return done.returncode, done.stdout + done.stderr


def test_help_and_recipes_fit_80_columns(desk: Path) -> None:
    code, text = make(desk)
    assert code == 0 and "make train" in text and len(text.splitlines()) > 20
    listed = make(desk, "recipes")[1].splitlines()
    assert [line for line in [*text.splitlines(), *listed] if len(line) > 80] == []
    columns = {line.index(recipe.line) for line, recipe in zip(listed, all_recipes(), strict=False)}
    assert columns == {2 + max(len(recipe.name) for recipe in all_recipes())}


@pytest.mark.parametrize("goals", [("help", "train"), ("train", "help")])
def test_help_of_a_verb_tells_its_variables_and_does_nothing(
    desk: Path, goals: tuple[str, str]
) -> None:
    code, text = make(desk, *goals)
    assert (
        code == 0
        and text.startswith("make train [NAME=value ...]: ")
        and "NODES" in text
        and "make plan" not in text
    )
    assert make(desk, "help", "drills") == (
        0,
        "make drills: run the slow tests, in groups [ONLY CHANGED]\n",
    )
    code, text = make(desk, "help", "tarin")
    assert code == 2 and "'tarin' is not a verb; did you mean train?" in text
    assert not (desk / "runs").exists()
    (desk / ".venv/bin/python").write_text("#!/bin/sh\necho ran; exit 1\n")
    assert make(desk, "help")[0] == 0  # without Python


@pytest.mark.parametrize(("typed", "offered"), [
    (["trainfleet", "tra"], "train"), (["trainfleet", "train"], "train"), (["trainfleet", "sample", "--te"], "--temperature"),
    (["trainfleet", "plan", "--nodes", "4", "--set", "--v"], "--verbose"), (["trainfleet", "train", "--te"], ""),
])  # fmt: skip
def test_bash_completes_a_verb_and_its_options(typed: list[str], offered: str) -> None:
    words = " ".join(map(shlex.quote, typed))
    program = f'{completion()}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _trainfleet trainfleet {typed[-1]}; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-ec", f"complete() {{ :; }}; {program}"],
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == (offered, "")


def test_the_page_of_verbs_has_each_of_them_and_each_variable() -> None:
    told: dict[str, set[str]] = {}
    for line in (ROOT / "docs/reference/verbs.md").read_text().splitlines():
        if line.startswith("| `make"):
            verbs = re.findall("`make ([a-z-]+)`", line.partition(" | ")[0])
            variables = set(re.findall("[A-Z_]+", line.rpartition(" | ")[2]))
            assert variables <= {name for verb in verbs if verb in VERBS for name in VERBS[verb]}
            told |= dict.fromkeys(verbs, variables)
    everywhere = {"CONFIG", "SET", "RUN"}
    lacking = {
        verb: left
        for verb, takes in VERBS.items()
        if (left := set(takes) - everywhere - told[verb])
    }
    assert lacking == {}


def test_from_another_folder_it_says_where_to_type(
    desk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    code, text = make(elsewhere, "-f", str(desk / "Makefile"), "plan")
    assert code != 0 and f"Type: make -C {desk}/" in text and not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    "goal", ["trian", "$(shell touch evil)", "`touch evil`;touch evil", "tr'ain\""]
)
def test_a_misspelt_verb_is_refused_with_a_suggestion_and_only_ever_data(
    desk: Path, goal: str
) -> None:
    code, text = make(desk, goal)
    assert code != 0 and "is not a verb" in text and "next: make shows all verbs" in text
    assert ("did you mean train?" in text) == ("evil" not in goal)
    assert not (desk / "evil").exists()


NAMES = {"tests": "test", "data": "", "schema": "", "docs": "", "python": "", "docker": "", "scripts": "", "Makefile": "",
         "config.yaml": "", "README.md": "", "requirements.lock": "", "scripts/venv.sh": "", "checks": "check", "plans": "plan",
         "runs/x": "", ".venv": "", "s.a.sh": "", "a.c": "", "plan.tex": "", "a.out": "", "a.o": "", "a.y": "", "b,v": "", "a:b;touch evil": "", "x: ;touch evil": "", "evil%": ""}  # fmt: skip


@pytest.mark.parametrize("goal", NAMES)
def test_a_goal_that_is_no_verb_is_refused_also_where_a_file_has_its_name(
    desk: Path, goal: str
) -> None:
    path = desk / goal
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if "." not in goal else path.touch()
    code, text = make(desk, goal)
    assert (
        code != 0
        and "is not a verb" in text
        and "up to date" not in text
        and "Nothing to be done" not in text
    ), text
    assert not NAMES[goal] or f"did you mean {NAMES[goal]}?" in text
    assert not (desk / "evil").exists()
    (desk / ".venv/bin/python").unlink()
    code, text = make(desk, goal)
    assert code != 0 and "no such verb" in text and "installing" not in text


@pytest.mark.parametrize("goals", [("clean", "hf", "PURGE=1", "YES=1"), ("-j4", "hf", "clean", "PURGE=1", "YES=1"),
                                   ("recipes", "clean", "tests", "PURGE=1", "YES=1"), ("-k", "clean", "b.yaml", "PURGE=1", "YES=1")])  # fmt: skip
def test_a_goal_beside_a_verb_is_refused_before_any_verb_does_anything(
    desk: Path, goals: tuple[str, ...]
) -> None:
    (desk / "tests").mkdir()
    for name in ("first-run", "hf"):
        (desk / "runs" / name / "checkpoints").mkdir(parents=True)
        (desk / "runs" / name / "config.yaml").write_text(f"name: {name}\n")
    code, text = make(desk, *goals)
    meant = {"hf": "RUN=hf", "tests": "test", "b.yaml": "CONFIG=b.yaml"}
    word = next(goal for goal in goals if goal in meant)
    assert code != 0 and f"error: {word!r} is not a verb; did you mean {meant[word]}?\n" in text
    assert (desk / "runs/first-run/checkpoints").exists() and "configs" not in text


def test_a_misspelt_verb_installs_nothing_on_a_bare_machine(desk: Path) -> None:
    (desk / ".venv" / "bin" / "python").unlink()
    code, text = make(desk, "trian")
    assert code != 0 and "no such verb" in text and "installing" not in text


@pytest.mark.parametrize("verb", ["sample", "eval", "export", "checkpoints", "verify"])
def test_a_verb_that_needs_a_run_says_that_there_is_none(desk: Path, verb: str) -> None:
    code, text = make(desk, verb, *(["OUT=model"] if verb == "export" else []))
    assert code != 0 and text.startswith(
        "error: runs/first-run: the run was never started\n  next: make train\n"
    )
    assert not (desk / "runs").exists()


def test_a_look_at_the_data_leaves_no_run_behind(desk: Path) -> None:
    code, text = make(desk, "inspect")
    assert code != 0 and text.startswith(
        "error: data/toy-stories: has no finished dataset\n  next: make tokenize\n"
    )
    assert not (desk / "runs").exists()


def test_one_request_to_stop_counts_once_however_often_make_and_the_shell_pass_it_on() -> None:
    with Interrupts() as interrupts:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert interrupts.count == 1
    with Interrupts() as interrupts:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.count == 2


def test_a_planned_command_is_folded_so_that_a_shell_still_takes_it() -> None:
    words = [
        sys.executable,
        "-c",
        "import sys; print(sys.argv[1:])",
        *"x" * 60,
        "a b " * 8,
        "--log={scratch}",
    ]
    lines = list(fold([shlex.quote(word) for word in words], 80))
    assert len(lines) > 2 and max(map(len, lines)) <= max(80, 8 + len(sys.executable))
    done = subprocess.run(
        ["sh", "-c", "\n".join(lines)], text=True, capture_output=True, check=True
    )
    assert done.stdout == f"{words[3:]}\n"
    assert hung("  head  ", "word " * 30).splitlines()[1].startswith("        word")


def test_names_and_text_are_utf_8_in_any_locale(desk: Path) -> None:
    (desk / "übung.yaml").write_text("name: a\ndata: {sources: [täxt]}\n", encoding="utf-8")
    code, text = make(
        desk, "plan", "CONFIG=übung.yaml", LC_ALL="POSIX", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0"
    )
    assert (
        code != 0 and "error: übung.yaml:2: data.sources[0]: täxt can't be read as a source" in text
    )


def test_in_a_pipe_an_error_comes_after_what_was_said_before_it(desk: Path) -> None:
    (desk / "config.yaml").unlink()
    (desk / "config.yaml").write_text("name: a\ndata: {sources: [missing]}\n")
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["make", "plan"],
        cwd=desk,
        env=buffered,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert 0 < done.stdout.index("estimate") < done.stdout.index("missing can't be read")


def test_half_a_line_that_a_full_disk_left_costs_no_other_line(tmp_path: Path) -> None:
    path, lines = tmp_path / "metrics.jsonl", Lines(tmp_path / "metrics.jsonl")
    append_line(path, {"step": 1})
    with open(path, "a") as file:
        file.write('{"step": 2, "lo')
    assert list(read_lines(path)) == lines.new() == [{"step": 1}]
    append_line(path, {"step": 3})
    assert list(read_lines(path)) == [{"step": 1}, {"step": 3}] and lines.new() == [{"step": 3}]


@pytest.mark.thorough
def test_an_environment_whose_making_was_stopped_is_made_again(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "empty.lock").touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)  # as venv leaves it, before it brings pip
    (tmp_path / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    done = subprocess.run(["scripts/venv.sh", "apply", "empty.lock"], cwd=tmp_path, text=True, capture_output=True,
                          env=os.environ | {"TRAINFLEET_PIP": "pip"})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    subprocess.run([python, "-m", "pip", "--version"], check=True, capture_output=True)


def test_a_recipe_in_another_folder_keeps_its_link_to_the_schema(desk: Path) -> None:
    for path in ("own.yaml", "configs/deep/own.yaml", "configs/deep/own.yaml"):
        code, text = make(desk, "config", "RECIPE=first-run", f"CONFIG={path}")
        assert code == 0, text
        link = (desk / path).read_text().splitlines()[0].partition("$schema=")[2]
        assert ((desk / path).parent / link).resolve() == (
            ROOT / "schema" / "config.schema.json"
        ).resolve(), link


def test_the_page_of_keys_shows_what_stands_between_angle_brackets() -> None:
    """Markdown takes <name> for a tag, which no browser shows."""
    page = (ROOT / "schema" / "README.md").read_text()
    outside = "".join(page.split("`")[::2])
    assert "runs/&lt;name>" in outside and "<" not in outside


def test_every_test_that_the_table_of_what_users_love_names_is_there() -> None:
    page = (ROOT / "tests" / "loved.md").read_text()
    rows = [line for line in page.splitlines() if line[:3].strip("| ").isdigit()]
    assert len(rows) == 26
    for file, _, name in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", page):
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).exists(), (
            file,
            name,
        )
