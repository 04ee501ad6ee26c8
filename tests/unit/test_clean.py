"""make clean removes what is ours and nothing else: no link is followed, no text of the user's goes, a purge is of one config."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from trainfleet.cli import fleet, plan
from trainfleet.trust.errors import ConfigError, TrainfleetError

PARTS = ("report.html", "plots/loss.png", "stop", "lock", "logs/node-0.parts/a", "logs/node-0.log", "checkpoints/.step-00000002/w",
         "checkpoints/step-00000001/w", "metrics.jsonl")  # fmt: skip
SHARDS = ("plan.json", "manifest.json", "tokenizer.json", "lock", "lengths.png", "train/00000.bin", "train/00000.idx",
          "train/00001.77.partial", "validation/00000.bin", "units/00000.json", "progress/0-1.json", "logs/node-0.log",
          "cache/0123456789abcdef-3", ".plan.json.4711", "units/.00000.json.4711")  # fmt: skip


def fill(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("12345")


def make_run(folder: Path) -> None:
    fill(folder, PARTS)
    (folder / "config.yaml").write_text(f"# as resolved\nname: {folder.name}\ntrain:\n  steps: 5\n")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, two datasets, and what is nobody's but the user's."""
    here = tmp_path / "desk"
    for name in ("mine", "other"):
        make_run(here / "runs" / name)
        fill(here / "data" / name, SHARDS)
    config = {"name": "mine", "data": {"name": "mine", "sources": ["stdlib"]}}
    (here / "config.yaml").write_text(yaml.safe_dump(config))
    fill(here / "data/mybooks", ("book.txt", "plots/figure.png"))
    fill(here / "data/mine", ("book.txt", "train/book.txt", "notes/.keep"))
    fill(
        here / "runs/sketches",
        ("plots/drawing.png", "report.html", "stop", "logs/a.parts", "config.yaml"),
    )
    fill(tmp_path / "precious", (*PARTS, *SHARDS, "config.yaml", "book.txt"))
    monkeypatch.chdir(here)
    return here


def state(folder: Path, but: tuple[str, ...] = ()) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not name.startswith(but or "\0"):
            found[name] = (
                os.fsencode(path.readlink())
                if path.is_symlink()
                else path.read_bytes()
                if path.is_file()
                else b""
            )
    return found


def type_clean(**variables: str) -> int:
    return fleet.clean(variables, 0.0)


def test_what_can_be_made_again_goes_of_runs_alone(desk: Path) -> None:
    others = state(desk, but=("runs/mine", "runs/other"))
    assert type_clean() == 0
    for name in ("mine", "other"):
        left = state(desk / "runs" / name)
        assert {
            "config.yaml",
            "metrics.jsonl",
            "logs/node-0.log",
            "checkpoints/step-00000001/w",
        } <= left.keys()
        assert not left.keys() & {
            "report.html",
            "plots/loss.png",
            "stop",
            "lock",
            "logs/node-0.parts",
            "checkpoints/.step-00000002",
        }
    assert state(desk, but=("runs/mine", "runs/other")) == others


def test_a_purge_is_of_what_the_named_config_made_and_no_more(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(desk / "runs/mine-profile-1122-031500")
    make_run(desk / "runs/mine-too")
    others = state(desk, but=("runs/", "data/mine"))
    assert type_clean(PURGE="1", YES="1") == 0
    assert sorted(path.name for path in (desk / "runs").iterdir()) == [
        "mine-too",
        "other",
        "sketches",
    ]
    assert sorted(state(desk / "data/mine")) == [
        "book.txt",
        "notes",
        "notes/.keep",
        "train",
        "train/book.txt",
    ]
    assert state(desk, but=("runs/", "data/mine")) == others
    said = capsys.readouterr().out
    assert "left data/mine/book.txt" in said and "runs/mine-profile-1122-031500" in said
    assert not [line for line in said.splitlines() if "other" in line or "mybooks" in line]


def test_a_text_of_the_user_s_under_data_is_no_dataset(desk: Path) -> None:
    (desk / "config.yaml").write_text(
        yaml.safe_dump({"name": "mine", "data": {"name": "mybooks", "sources": ["stdlib"]}})
    )
    before = state(desk / "data")
    assert type_clean(PURGE="1", YES="1") == 1
    assert state(desk / "data") == before and not (desk / "runs/mine").exists()


@pytest.mark.parametrize("link", [
    "runs/mine", "runs/other", "runs/mine/plots", "runs/mine/logs", "runs/mine/checkpoints", "runs/mine/report.html", "runs/mine/config.yaml",
    "data/mine", "data/mine/train", "data/mine/units", "data/mine/plan.json", "runs/sketches", "data/mybooks", "runs/mine/plots/loss.png",
    ".compiled", ".mypy_cache", "python",
])  # fmt: skip
@pytest.mark.parametrize("purge", ["", "1"])
def test_no_link_is_followed_and_none_stops_it(desk: Path, link: str, purge: str) -> None:
    target = (
        desk.parent / "precious" / Path(link).name
        if Path(link).suffix
        else desk.parent / "precious"
    )
    (desk.parent / "precious/__pycache__").mkdir()
    if (desk / link).exists():
        (desk / link).rename(desk / "aside")
    (desk / link).symlink_to(target)
    precious = state(desk.parent / "precious")
    assert type_clean(PURGE=purge, YES="1") in (0, 1)
    assert state(desk.parent / "precious") == precious
    if purge and link not in ("runs/mine", "runs/mine/config.yaml"):
        assert not (desk / "runs/mine").exists(), "the link stopped it half way"
    if purge and link not in ("data/mine", "data/mine/plan.json"):
        assert not (desk / "data/mine/train/00000.bin").exists(), "the link stopped it half way"


@pytest.mark.parametrize("name", ["../../precious", "..", "/etc", "../mybooks", "."])
def test_a_name_in_a_run_folder_s_config_leads_nowhere_else(desk: Path, name: str) -> None:
    text = (desk / "runs/mine/config.yaml").read_text()
    (desk / "runs/mine/config.yaml").write_text(f"{text}data:\n  name: {name}\n")
    before = state(desk.parent, but=("desk/runs", "desk/data/mine"))
    try:
        type_clean(PURGE="1", YES="1")
    except TrainfleetError:
        pass
    assert state(desk.parent, but=("desk/runs", "desk/data/mine")) == before


def test_without_a_terminal_nothing_is_purged_unasked(desk: Path) -> None:
    with pytest.raises(TrainfleetError, match="there is no terminal"):
        type_clean(PURGE="1")
    assert (desk / "runs/mine/checkpoints/step-00000001/w").exists() and (
        desk / "data/mine/train/00000.bin"
    ).exists()


@pytest.mark.parametrize(
    "where", [".", "../desk", "runs/mine", "data/mine", "python", "config.yaml", "link", "plan"]
)
def test_a_plan_is_written_to_no_folder_with_other_files(desk: Path, where: str) -> None:
    fill(desk / "python", ("module.py",))
    fill(desk / "plan", ("config.yaml",))
    (desk / "link").symlink_to(".")
    before = state(desk)
    with pytest.raises(ConfigError, match="OUT"):
        plan.plan({"OUT": where}, 0.0)
    assert state(desk) == before


def test_a_plan_is_written_to_a_new_folder_an_empty_one_and_an_earlier_plan_s(desk: Path) -> None:
    (desk / "empty").mkdir()
    (desk / "config.yaml").write_text(
        yaml.safe_dump({"name": "mine", "data": {"name": "fresh", "sources": ["stdlib"]}})
    )
    for where in ("new", "empty", "new", "deep/er"):
        assert plan.plan({"OUT": where}, 0.0) == 0
        assert (desk / where / "plan.json").exists() and (desk / where / "config.yaml").exists()
