"""A node that lies: whatever it answers, nothing outside the run folder changes, and nothing in it that is not the node's to write."""

from __future__ import annotations

import base64
import json
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from trainfleet.config.host_list import Host
from trainfleet.hosts import mirror as mirroring
from trainfleet.hosts.host_results import HostFailure, Result
from trainfleet.hosts.mirror import Mirror
from trainfleet.hosts.transport import Transport
from trainfleet.storage.sync_rules import FILES, MOST, limit
from trainfleet.trust.errors import RunError

HOST = Host("liar", "192.0.2.1")
NOW = 1_700_000_000.0


def piece(
    data: bytes = b"planted\n",
    offset: int = 0,
    size: int | None = None,
    stamp: Any = NOW,
    inode: Any = 7,
) -> list[Any]:
    packed = base64.b85encode(zlib.compress(data)).decode()
    return [offset, offset + len(data) if size is None else size, stamp, inode, packed]


def answer(pieces: dict[str, Any], **changes: Any) -> str:
    return json.dumps({"files": pieces, "paths": list(pieces), "whole": True, "now": NOW} | changes)


def planted(name: str) -> str:
    return answer({name: piece()})


NAMES = [
    "../../victim.txt", "../other/results.json", "/tmp/victim.txt", "//tmp/victim.txt", "..", ".", "", "/", "logs/../../../victim.txt",
    "logs/../config.yaml", "./config.yaml", "logs//../config.yaml", "config.yaml", "given.yaml", "launch.yaml", "lock", "report.html",
    "checkpoints/step-00000001/.metadata", "checkpoints/step-00000001/COMMIT", "huggingface/step-00000001/config.json",
    "heartbeats/rank-0.json", "notes.txt", ".bashrc", "logs/.ssh", "logs/..log", "logs/-rf.log", "logs/a b.log", "logs/a\n.log",
    "logs/node-0.log\n", "logs/node-0.log\0", "logs\\..\\..\\victim.log", "logs/\u202egol.log", "logs/\uff0e\uff0e/victim.log",
    "logs/\u2024\u2024\u2215victim.log", "results.json\u0000.txt", "RESULTS.JSON", "Config.yaml", "plots/loss.html", "plots/loss.svg",
    "plots/loss.png/../../config.yaml", "logs/" + "a" * 300 + ".log", "logs/deep/er/node-0.log", "events/../lock.jsonl",
    "tensorboard/../config.yaml", "tensorboard/.hidden", "profile/run.sh", "~/victim.txt", "$HOME/victim.txt", "logs/n\u00f6de.log",
    "logs/\x1b[2J.log", "COM1/results.json",
]  # fmt: skip

LIES: dict[str, str] = {
    **{f"the name {name!a}": planted(name) for name in NAMES},
    **{f"gone: {name!a}": answer({"stop": piece(b"")}, paths=["stop", name]) for name in ("../../victim.txt", "config.yaml")},
    "no answer": "", "no JSON": "<html>Welcome</html>", "half an answer": planted("results.json")[:-20],
    "two answers": planted("results.json") * 2, "a list": "[]", "a number": "7", "null": "null", "a string": '"files"',
    "NaN for the time": planted("results.json").replace(str(NOW), "NaN"),
    "Infinity for the time": planted("results.json").replace(str(NOW), "Infinity"),
    "1e999 for the time": planted("results.json").replace(str(NOW), "1e999"),
    "endless digits": planted("results.json").replace(str(NOW), "9" * 5000),
    "a hundred thousand levels": "[" * 100_000, "levels that close": "[" * 50_000 + "]" * 50_000,
    "levels under files": '{"files": ' + '{"a":' * 5000 + "1" + "}" * 5000 + ', "paths": [], "whole": true, "now": 1}',
    "a key twice": '{"files": {}, "files": {}, "paths": [], "whole": true, "now": 1}',
    "a file twice": answer({"results.json": piece()}).replace(
        '{"results.json":', '{"results.json": [0, 0, 1.0, 1, ""], "results.json":'),
    "a name twice": answer({"results.json": piece()}, paths=["results.json", "results.json"]),
    "a file that is not listed": answer({"results.json": piece()}, paths=[]),
    "a key too many": answer({}, sudo=True), "a key too few": '{"files": {}, "paths": [], "whole": true}',
    "files is a list": answer({}, files=[["results.json", 0]]), "paths is an object": answer({}, paths={}),
    "paths is a string": answer({}, paths="results.json"), "a path is a number": answer({}, paths=[7]),
    "a path is a list": answer({}, paths=[["results.json"]]), "a path is null": answer({}, paths=[None]),
    "whole is a string": answer({}, whole="no"), "whole is 1": answer({}, whole=1), "now is a string": answer({}, now="now"),
    "now is true": answer({}, now=True), "now is null": answer({}, now=None), "now is in the year 30,000": answer({}, now=9e11),
    "now is before all time": answer({}, now=-1e9), "lone surrogates": '{"\\ud800": 1}',
    "a piece is null": answer({"results.json": None}), "a piece is an object": answer({"results.json": {}}),
    "a piece of four": answer({"results.json": piece()[:4]}), "a piece of six": answer({"results.json": [*piece(), 1]}),
    "an offset of a terabyte": answer({"metrics.jsonl": piece(offset=1 << 40)}),
    "an offset of one": answer({"metrics.jsonl": piece(offset=1)}), "an offset below 0": answer({"metrics.jsonl": piece(offset=-1)}),
    "an offset that is a float": answer({"metrics.jsonl": [0.0, *piece()[1:]]}),
    "an offset that is text": answer({"metrics.jsonl": ["0", *piece()[1:]]}),
    "an offset that is false": answer({"metrics.jsonl": [False, *piece()[1:]]}),
    "another size": answer({"metrics.jsonl": piece(size=1 << 40)}), "a size below 0": answer({"metrics.jsonl": piece(size=-8)}),
    "a size that is null": answer({"metrics.jsonl": [0, None, *piece()[2:]]}),
    "a time that is text": answer({"metrics.jsonl": piece(stamp="now")}),
    "a time that no file has": answer({"metrics.jsonl": piece(stamp=1e300)}),
    "a time below 0": answer({"metrics.jsonl": piece(stamp=-1.0)}), "an inode that is text": answer({"metrics.jsonl": piece(inode="7")}),
    "an inode of 200 bits": answer({"metrics.jsonl": piece(inode=1 << 200)}),
    "no base 85": answer({"metrics.jsonl": [0, 4, NOW, 7, "\u00e9\u00e9\u00e9"]}),
    "no zlib": answer({"metrics.jsonl": [0, 4, NOW, 7, base64.b85encode(b"abcd").decode()]}),
    "half a zlib": answer({"metrics.jsonl": [0, 4, NOW, 7, base64.b85encode(zlib.compress(b"abcd" * 99)[:-6]).decode()]}),
    "data behind the end": answer({"metrics.jsonl": [0, 4, NOW, 7, base64.b85encode(zlib.compress(b"abcd") + b"more").decode()]}),
    "data that is a list": answer({"metrics.jsonl": [0, 4, NOW, 7, ["a"]]}),
    "a bomb": answer({"metrics.jsonl": piece(bytes(MOST + 1))}),
    "many small bombs": answer({f"logs/node-{n}.log": piece(bytes(MOST // 4)) for n in range(5)}),
    "a large word": answer({"stop": piece(b"not an empty file")}),
    "an endless page": answer({"results.json": piece(bytes(MOST))}, whole=False).replace(str(MOST), str(17 << 20)),
    "too many files": answer({}, paths=[f"logs/node-{n}.log" for n in range(FILES + 1)]),
    "never whole": answer({}, whole=False),
}  # fmt: skip


class Liar:
    """A transport to one host that gives these answers in turn, the last one for ever."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), 0

    def ask(self, host: Host, command: str, *, timeout: float, stdin: str) -> Result | HostFailure:
        self.asked += 1
        return Result(0, self.answers[min(self.asked, len(self.answers)) - 1], "", 0.0)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A desk with a run folder and what is around it, which must stay as it is."""
    here = tmp_path / "desk/runs/x"
    (here / "checkpoints/step-00000001").mkdir(parents=True)
    for name in (
        "config.yaml",
        "given.yaml",
        "lock",
        "notes.txt",
        "report.html",
        "checkpoints/step-00000001/.metadata",
    ):
        (here / name).write_text("mine")
    for name in ("victim.txt", "desk/victim.txt", "desk/config.yaml", "desk/runs/victim.txt"):
        (tmp_path / name).write_text("precious")
    monkeypatch.chdir(tmp_path / "desk")
    return tmp_path


def mirror_of(*answers: str) -> tuple[Mirror, Liar]:
    liar = Liar(*answers)
    return Mirror(cast(Transport, liar), "/fsx", "/fsx/code", "python", Path("runs/x")), liar


def state(folder: Path, but: Path | None = None) -> dict[str, object]:
    """Everything in a folder: kind, mode, times and content."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if but is None or not path.is_relative_to(but):
            seen = path.lstat()
            content = (
                str(path.readlink())
                if path.is_symlink()
                else path.read_bytes()
                if path.is_file()
                else b""
            )
            found[str(path)] = (
                stat.S_IFMT(seen.st_mode),
                seen.st_mode,
                0 if path.is_dir() else seen.st_mtime_ns,
                content,
            )
    return found


def test_there_are_lies_of_every_kind() -> None:
    assert len(LIES) >= 50


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_is_a_failure_of_that_host_and_changes_nothing(world: Path, lie: str) -> None:
    mirror, liar = mirror_of(lie)
    before = state(world)
    failure = mirror.refresh(HOST)
    assert isinstance(failure, HostFailure) and failure.kind == "untrue" and failure.message, (
        failure
    )
    assert (
        not any(letter in str(failure) for letter in "\x1b\n\0\u202e") and len(str(failure)) < 400
    )
    assert state(world) == before and not mirror.known and liar.asked == 1


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_after_the_truth_changes_nothing_either(world: Path, lie: str) -> None:
    truth = answer(
        {
            "results.json": piece(b"{}"),
            "logs/node-0.log": piece(b"a line\n"),
            "metrics.jsonl": piece(b"{}\n" * 9),
        }
    )
    mirror, _ = mirror_of(truth, lie)
    assert mirror.refresh(HOST) == NOW
    before = state(world)
    assert isinstance(mirror.refresh(HOST), HostFailure) and state(world) == before
    assert (world / "desk/runs/x/logs/node-0.log").read_bytes() == b"a line\n"


def test_what_was_never_brought_is_not_removed(world: Path) -> None:
    mirror, _ = mirror_of(answer({}))
    (world / "desk/runs/x/results.json").write_text("{}")
    assert mirror.refresh(HOST) == NOW and (world / "desk/runs/x/results.json").exists()


def test_what_was_brought_goes_when_it_is_gone_there_and_nothing_else_does(world: Path) -> None:
    mirror, _ = mirror_of(answer({"stop": piece(b"")}), answer({}))
    before = state(world)
    mirror.refresh(HOST)
    assert (world / "desk/runs/x/stop").exists()
    assert mirror.refresh(HOST) == NOW and state(world) == before


LINKS: dict[str, Callable[[Path], object]] = {
    "a folder": lambda here: (here / "logs").symlink_to("../../elsewhere"),
    "a folder that is absolute": lambda here: (here / "logs").symlink_to(
        here.parents[1] / "elsewhere"
    ),
    "a folder that is not there": lambda here: (here / "logs").symlink_to(
        here.parents[1] / "elsewhere/new"
    ),
    "a file": lambda here: (
        (here / "logs").mkdir(),
        (here / "logs/node-0.log").symlink_to(here.parents[1] / "elsewhere/node-0.log"),
    ),
    "a file that is not there": lambda here: (
        (here / "logs").mkdir(),
        (here / "logs/node-0.log").symlink_to("../../../elsewhere/new"),
    ),
}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
@pytest.mark.parametrize("moment", ["before", "between"])
def test_no_link_in_the_run_folder_is_followed(
    world: Path, link: Callable[[Path], object], moment: str
) -> None:
    here, elsewhere = world / "desk/runs/x", world / "desk/elsewhere"
    elsewhere.mkdir()
    (elsewhere / "node-0.log").write_text("precious")
    more = answer({"logs/node-0.log": piece(b"more\n", offset=8)})
    mirror, liar = mirror_of(planted("logs/node-0.log"), more, answer({}))
    if moment == "between":
        mirror.refresh(HOST)
        (here / "logs/node-0.log").unlink()
        (here / "logs").rmdir()
    else:
        liar.answers.pop(1)
    link(here)
    before = state(world, but=here)
    for _ in range(3):
        try:
            mirror.refresh(HOST)
        except RunError as error:
            assert "link" in str(error) and "logs" in str(error)
    assert state(world, but=here) == before


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_plain_file_is_neither_opened_nor_replaced_by_a_hang(
    world: Path, kind: str
) -> None:
    here = world / "desk/runs/x"
    os.mkfifo(here / "results.json") if kind == "fifo" else (here / "results.json").mkdir()
    mirror, _ = mirror_of(answer({"results.json": piece(b"{}")}))
    if kind == "fifo":
        assert mirror.refresh(HOST) == NOW and (here / "results.json").read_text() == "{}"
    else:
        with pytest.raises(RunError, match=r"results\.json"):
            mirror.refresh(HOST)
        assert not list(here.glob(".results*"))


def test_answers_that_never_end_end(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "ROUNDS", 5)
    again = answer({"metrics.jsonl": piece(bytes(MOST), stamp=0.0)}, whole=False)
    mirror, liar = mirror_of(again)
    failure = mirror.refresh(HOST)
    assert (
        isinstance(failure, HostFailure) and "it does not end" in str(failure) and liar.asked == 5
    )
    assert (world / "desk/runs/x/metrics.jsonl").stat().st_size == MOST


def test_a_file_grows_to_its_limit_and_not_beyond(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = limit("metrics.jsonl")
    assert most and most % MOST == 0
    mirror, _ = mirror_of(answer({"metrics.jsonl": piece(b"x", offset=most)}))
    mirror.known["metrics.jsonl"] = (most, NOW, 7)
    monkeypatch.setattr(Mirror, "_forget_lost", lambda self: None)
    assert isinstance(mirror.refresh(HOST), HostFailure)


def test_a_fleet_can_not_fill_this_disk(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring.sync_rules, "SPARE", 1 << 60)
    mirror, _ = mirror_of(planted("results.json"))
    before = state(world)
    with pytest.raises(RunError) as refused:
        mirror.refresh(HOST)
    assert "free some space" in str(refused.value)
    assert state(world) == before


def test_what_is_lost_here_is_asked_for_anew(world: Path) -> None:
    mirror, _ = mirror_of(planted("metrics.jsonl"), planted("metrics.jsonl"))
    mirror.refresh(HOST)
    (world / "desk/runs/x/metrics.jsonl").unlink()
    assert (
        mirror.refresh(HOST) == NOW
        and (world / "desk/runs/x/metrics.jsonl").read_text() == "planted\n"
    )
