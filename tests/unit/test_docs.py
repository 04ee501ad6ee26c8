"""The pages for readers: every link leads somewhere, every command is one, and every config plans."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

import pages
from pages import ROOT
from trainfleet.backends import terms_of
from trainfleet.cli import VERBS, main
from trainfleet.cli.variables import read_variables
from trainfleet.config.load import Settings, load
from trainfleet.health import fence, lease
from trainfleet.launch import execution
from trainfleet.node import barrier, entrypoint, exit_codes, supervisor
from trainfleet.recipes import all_recipes
from trainfleet.trust.errors import ConfigError, TrainfleetError

OF_MAKE = {"drills", "help"}  # verbs of the Makefile alone
STARTS = [
    page for page in pages.ALL if page.parent.name == "start" and "RECIPE=" in page.read_text()
]
STARTED = " ".join(command for page in STARTS for command in pages.commands(page)).split()
OFFLINE = [
    text for _, text in pages.configs() if 'preset: "hf:' not in text
]  # the Hub is not asked for a model


def anchors(page: Path) -> set[str]:
    """The names that headings of a page have in a link, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.*)", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages.ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    for link in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    ):
        if not re.match("[a-z]+:", link):
            path, _, heading = link.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), link
            assert not heading or heading in anchors(there), link


@pytest.mark.parametrize("page", pages.ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(
        r"`((?:tests|scripts|docker|python|schema|docs)/[\w./*-]+)`", page.read_text()
    )
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


def test_the_index_links_to_every_page() -> None:
    index = ROOT / "docs/README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve()
        for link in re.findall(r"\]\(([^)\s]+)\)", index.read_text())
    }
    assert {page for page in pages.ALL if page.is_relative_to(ROOT / "docs")} - {index} <= linked
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1200


@pytest.mark.parametrize("page", pages.ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_a_verb_with_its_variables(page: Path) -> None:
    for command in [*pages.commands(page), *pages.mentioned(page)]:
        program, verb, *words = shlex.split(command)
        if program in ("make", "trainfleet") and verb not in OF_MAKE:
            read_variables(verb, VERBS[verb], words, {})
            recipe = next(
                (word.partition("=")[2] for word in words if word.startswith("RECIPE=")), None
            )
            assert recipe is None or recipe in {known.name for known in all_recipes()}


@pytest.mark.parametrize("page", STARTS, ids=lambda page: page.stem)
def test_a_reader_can_plan_from_a_start_page_without_hosts_and_account(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's own commands, in its order; what it says of the plan's files is there."""
    monkeypatch.chdir(tmp_path)
    typed = [
        shlex.split(command)[1:]
        for command in pages.commands(page)
        if re.match("make (config|plan)", command)
    ]
    for verb, *words in typed:
        assert main([verb, *words, *["SET=fleet.hosts=[]"] * (verb == "plan")]) == 0, (
            capsys.readouterr().err
        )
    assert [words[0] for words in typed] == ["config", "plan"]
    for path in re.findall(r"\bplan/[\w*./-]+", page.read_text()):
        assert list(tmp_path.glob(path)), path


@pytest.mark.parametrize("text", OFFLINE, ids=pages.name_of)
def test_every_config_is_one(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    load(Settings(Path("config.yaml")), terms_of)


@pytest.mark.parametrize("text", OFFLINE, ids=pages.name_of)
def test_every_config_plans_within_its_budget(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hosts and texts of a page are nobody's: without hosts, and with a text that is here."""
    (tmp_path / "config.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "SET=fleet.hosts=[] data.sources=[stdlib]"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", ["README.md", "docs/start/laptop.md"])
def test_the_first_command_clones_the_address_of_the_package(page: str) -> None:
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert pages.commands(ROOT / page)[0] == f"git clone {address}"


def test_the_picture_of_the_plan_is_what_the_readme_s_config_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for figures, which change with the planner. `python docs/terminal.py` draws it again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "116")
    Path("config.yaml").write_text(pages.blocks(ROOT / "README.md", "yaml")[0])
    assert main(["plan"]) == 0
    printed = [
        "$ make plan",
        *(line for line in capsys.readouterr().out.splitlines() if line.strip()),
    ]
    words = [
        [re.findall("[A-Za-z_]{4,}", line) for line in lines]
        for lines in (pages.drawn(ROOT / "docs/plan.svg"), printed)
    ]
    assert words[0] == words[1]


def test_the_readme_sizes_the_fleet_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(pages.blocks(ROOT / "README.md", "yaml")[0])
    (sizing,) = [
        shlex.split(command)[1:]
        for command in pages.mentioned(ROOT / "README.md")
        if "TOKENS=" in command
    ]
    assert main([*sizing, "SET=fleet.hosts=[] data.sources=[stdlib]"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [recipe.name for recipe in all_recipes() if f"RECIPE={recipe.name}" not in STARTED]
)
def test_every_other_recipe_plans_within_its_budget(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Offline, without its hosts and the run that it goes on from."""
    monkeypatch.chdir(tmp_path)
    assert main(["config", f"RECIPE={name}"]) == 0
    assert main(["plan", "SET=fleet.hosts=[] train.init_from=null"]) == 0, capsys.readouterr().err
    assert len(capsys.readouterr().out.splitlines()) < 200  # scripts and requests are only counted


def test_the_page_of_nanochat_has_the_figures_of_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/how-to/nanochat.md").read_text()
    monkeypatch.chdir(tmp_path)
    assert main(["config", "RECIPE=nanochat-d20-p5-ec2"]) == 0 and main(["plan"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    weights, speed, time, low, high, training, usd = re.search(
        r"parameters ([\d.]+) M .* speed about ([\d,]+) tokens/s.* time about (\d+ h \d+ min); ([\d.]+)-([\d.]+) hours"
        r".* training ([\d.]+) .* all ([\d.]+) which budget", said
    ).groups()  # type: ignore[union-attr]  # fmt: skip
    assert f"| {float(weights):.0f} million |" in page
    assert f"| {int(speed.replace(',', '')) / 1e6:.2f} million |" in page
    assert f"| {time}; {low} to {high} hours for four of five such runs |" in page
    assert f"| ${float(training):.0f}, and ${float(usd):.0f} with setup" in page


def test_the_page_of_errors_has_the_exit_codes_of_the_program() -> None:
    parts = re.split("^## .*", (ROOT / "docs/reference/errors.md").read_text(), flags=re.MULTILINE)
    verb, node = (
        {int(code) for code in re.findall(r"^\| (\d+) \|", part, flags=re.MULTILINE)}
        for part in parts[1:3]
    )
    assert verb == {0, TrainfleetError.exit_code, ConfigError.exit_code, execution.STOPPED}
    again = {entrypoint.AGAIN, supervisor.OCCUPIED, fence.Fenced.exit_code}
    other = {exit_codes.ELSEWHERE, lease.LEFT}
    assert (
        node == {barrier.Missing.exit_code, supervisor.SEVERED, supervisor.UNLOGGED} | again | other
    )
    assert len(again) == len(other) == 1  # each is one row


def test_each_word_of_the_glossary_is_used_in_messages_or_pages() -> None:
    glossary = ROOT / "docs/reference/glossary.md"
    words = re.findall(r"^\| ([A-Za-z-][A-Za-z -]*) \|", glossary.read_text(), flags=re.MULTILINE)
    defined = [word for word in words if word != "word"]
    assert len(defined) == len(set(defined)) > 40
    others = [page for page in pages.ALL if page != glossary]
    used = " ".join(
        path.read_text().lower() for path in [*others, *(ROOT / "python").rglob("*.py")]
    )
    assert not [word for word in defined if word.lower() not in used]


TROUBLE = (ROOT / "docs/how-to/troubleshooting.md").read_text()
ERRORS = re.findall(
    r"^\| `([^`]*)` \| (.*) \| .* \|$", TROUBLE.partition("## The ten")[2], flags=re.MULTILINE
)


@pytest.mark.parametrize("page", pages.tables(), ids=lambda page: page.stem)
def test_a_table_of_the_program_is_shown_as_it_is(page: Path) -> None:
    assert page.read_text() == pages.written(page, pages.tables()[page]), (
        "python tests/pages.py writes it"
    )


@pytest.mark.parametrize(("wrote", "said"), ERRORS)
def test_troubleshooting_quotes_what_a_bad_config_is_told(
    wrote: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = yaml.safe_load(wrote)
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(
        f"name: a\n{wrote}\n" if "name" in keys else json.dumps({"name": "a"} | keys)
    )
    assert main(["plan"]) == 2 and said in capsys.readouterr().err and len(ERRORS) == 10
