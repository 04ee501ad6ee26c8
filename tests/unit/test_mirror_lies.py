"""A node that lies: whatever it answers, nothing outside the run folder changes, and nothing in it that is not the node's to write."""

from __future__ import annotations

import base64
import gzip
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from trainfleet.config.host_list import Host
from trainfleet.hosts import mirror as mirroring
from trainfleet.hosts.host_results import HostFailure, Result
from trainfleet.hosts.mirror import MOST, FileState, Mirror
from trainfleet.hosts.transport import Transport
from trainfleet.storage.sync_rules import FILES, limit
from trainfleet.trust.errors import RunError

HOST = Host("liar", "192.0.2.1")
NOW = 1_700_000_000.0
CLOCK = "1700000000.000000000\n"


def listed(sizes: dict[str, int], stamp: str = "1700000000.5000000000", inode: int = 7) -> str:
    """What `find` says of these files, and then the clock."""
    return "".join(f"{size} {stamp} {inode} {name}\0" for name, size in sizes.items()) + CLOCK


def packed(*contents: bytes) -> str:
    return base64.b64encode(gzip.compress(b"".join(contents))).decode()


def truth(files: dict[str, bytes], sent: dict[str, bytes] | None = None) -> list[str]:
    """A node's two answers: its files, and what is new of them."""
    new = files if sent is None else sent
    return [listed({name: len(data) for name, data in files.items()}), packed(*new.values())]


def planted(name: str) -> list[str]:
    return truth({name: b"planted\n"})


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

ONE = listed({"metrics.jsonl": 8})
LIES: dict[str, list[str]] = {
    "no answer": [""], "a page": ["<html>Welcome</html>"], "half an answer": [ONE[:-5]], "no clock": [ONE.removesuffix(CLOCK)],
    "two clocks": [ONE + CLOCK], "two answers": [ONE * 2], "JSON": ['{"files": {}, "paths": [], "whole": true, "now": 1}'],
    "a clock that is no number": [ONE.replace(CLOCK, "now\n")], "NaN for the clock": [ONE.replace(CLOCK, "nan\n")],
    "Infinity for the clock": [ONE.replace(CLOCK, "inf\n")], "1e999 for the clock": [ONE.replace(CLOCK, "1e999\n")],
    "endless digits for the clock": [ONE.replace(CLOCK, "9" * 5000 + ".000000000\n")],
    "a clock in the year 30,000": [ONE.replace(CLOCK, "900000000000.000000000\n")],
    "a clock before all time": [ONE.replace(CLOCK, "-1000000000.000000000\n")],
    "a clock in other digits": [ONE.replace("1700000000.000000000", "\u0661700000000.000000000")],
    "a size below 0": [listed({"metrics.jsonl": -8})], "endless digits for a size": [ONE.replace("8 ", "9" * 5000 + " ", 1)],
    "a size in other digits": [ONE.replace("8 ", "\u0668 ", 1)], "a size that is a float": [ONE.replace("8 ", "8.0 ", 1)],
    "a size too few": [ONE.removeprefix("8 ")], "a time that is text": [listed({"metrics.jsonl": 8}, stamp="now")],
    "a time that no file has": [listed({"metrics.jsonl": 8}, stamp="1e300")], "an inode that is text": [ONE.replace(" 7 ", " x ")],
    "an inode of 200 bits": [listed({"metrics.jsonl": 8}, inode=1 << 200)], "a name of no letters": [listed({"": 8})],
    "an escape": ["\x1b[2J" + ONE], "lone surrogates": ["\ud800" + ONE], "lines": [ONE.replace("\0", "\n")],
    "too many files": [listed({f"logs/node-{n}.log": 0 for n in range(FILES + 1)})],
    "too many bytes": [listed({f"logs/node-{n}.log": limit("logs/node-0.log") or 0 for n in range(65)})],
    "no bytes": [ONE, ""], "a page for bytes": [ONE, "<html>"], "no base 64": [ONE, "\u00e9\u00e9\u00e9="],
    "base 64 with a line's end": [ONE, packed(b"planted\n") + "\n"], "no gzip": [ONE, base64.b64encode(b"abcd").decode()],
    "half a gzip": [ONE, base64.b64encode(gzip.compress(b"planted\n")[:-6]).decode()],
    "a gzip that is another file's": [ONE, base64.b64encode(gzip.compress(b"planted\n")[:-6] + b"------").decode()],
    "data behind the end": [ONE, base64.b64encode(gzip.compress(b"planted\n") + b"more").decode()],
    "two gzips": [ONE, base64.b64encode(gzip.compress(b"plan") + gzip.compress(b"ted\n")).decode()],
    "a byte too many": [ONE, packed(b"planted\n+")], "a bomb": [ONE, packed(bytes(MOST * 3))],
    "a bomb for an empty file": [listed({"stop": 0}), packed(b"x")],
}  # fmt: skip


class Liar:
    """A transport to one host that gives these answers in turn."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), 0

    def ask(self, host: Host, command: str, *, timeout: float, stdin: str) -> Result | HostFailure:
        self.asked += 1
        return Result(0, self.answers[self.asked - 1], "", 0.0)


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
    return Mirror(cast(Transport, liar), "/fsx", Path("runs/x")), liar


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


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_run_folder_s_file_has_is_never_asked_for(world: Path, name: str) -> None:
    mirror, liar = mirror_of(listed({name: 8}))
    before = state(world)
    mirror.refresh(HOST)
    assert state(world) == before and not mirror.known and liar.asked == 1


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_is_a_failure_of_that_host_and_changes_nothing(world: Path, lie: list[str]) -> None:
    mirror, liar = mirror_of(*lie)
    before = state(world)
    failure = mirror.refresh(HOST)
    assert isinstance(failure, HostFailure) and failure.kind == "untrue" and failure.message, (
        failure
    )
    assert (
        not any(letter in str(failure) for letter in "\x1b\n\0\u202e") and len(str(failure)) < 400
    )
    assert state(world) == before and not mirror.known and liar.asked == len(lie)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_after_the_truth_changes_nothing_either(world: Path, lie: list[str]) -> None:
    mirror, _ = mirror_of(
        *truth({"results.json": b"{}", "logs/node-0.log": b"a line\n", "metrics.jsonl": b"{}\n"}),
        *lie,
    )
    assert mirror.refresh(HOST) == NOW
    before = state(world)
    assert isinstance(mirror.refresh(HOST), HostFailure) and state(world) == before
    assert (world / "desk/runs/x/logs/node-0.log").read_bytes() == b"a line\n"


def test_a_file_that_shrinks_while_it_is_copied_changes_nothing_until_it_is_whole(
    world: Path,
) -> None:
    mirror, _ = mirror_of(
        listed({"metrics.jsonl": 8}), packed(b"half"), *truth({"metrics.jsonl": b"{}\n"})
    )
    before = state(world)
    assert mirror.refresh(HOST) == NOW and state(world) == before
    assert mirror.refresh(HOST) == NOW
    assert (world / "desk/runs/x/metrics.jsonl").read_text() == "{}\n"


def test_what_was_never_brought_is_not_removed(world: Path) -> None:
    mirror, _ = mirror_of(CLOCK)
    (world / "desk/runs/x/results.json").write_text("{}")
    assert mirror.refresh(HOST) == NOW and (world / "desk/runs/x/results.json").exists()


def test_what_was_brought_goes_when_it_is_gone_there_and_nothing_else_does(world: Path) -> None:
    mirror, _ = mirror_of(*truth({"stop": b""}), CLOCK)
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
    name, more = "logs/node-0.log", b"planted\nmore\n"
    mirror, _ = mirror_of(*planted(name), *(truth({name: more}) * 3), CLOCK)
    if moment == "between":
        mirror.refresh(HOST)
        (here / "logs/node-0.log").unlink()
        (here / "logs").rmdir()
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
    mirror, _ = mirror_of(*truth({"results.json": b"{}"}))
    if kind == "fifo":
        assert mirror.refresh(HOST) == NOW and (here / "results.json").read_text() == "{}"
    else:
        with pytest.raises(RunError, match=r"results\.json"):
            mirror.refresh(HOST)
        assert not list(here.glob(".results*"))


def test_a_large_file_comes_in_pieces_and_goes_on_where_it_stopped(world: Path) -> None:
    size = 2 * MOST + 5
    one, data = listed({"metrics.jsonl": size}), [bytes([n]) * MOST for n in (1, 2)]
    mirror, liar = mirror_of(one, *map(packed, data), "", one, packed(b"tail\n"))
    assert isinstance(mirror.refresh(HOST), HostFailure) and liar.asked == 4
    assert mirror.known["metrics.jsonl"] == FileState(2 * MOST, 0.0, 7)
    assert mirror.refresh(HOST) == NOW
    assert (world / "desk/runs/x/metrics.jsonl").read_bytes() == b"".join(data) + b"tail\n"


def test_a_file_grows_to_its_limit_and_not_beyond(world: Path) -> None:
    most = limit("metrics.jsonl")
    assert most
    mirror, liar = mirror_of(listed({"metrics.jsonl": most + 9, "stop": 1}), packed(b""))
    mirror.known["metrics.jsonl"] = FileState(most, NOW, 7)
    with open(world / "desk/runs/x/metrics.jsonl", "wb") as file:
        file.truncate(most)
    assert mirror.refresh(HOST) == NOW and liar.asked == 2
    assert (world / "desk/runs/x/metrics.jsonl").stat().st_size == most
    assert not (world / "desk/runs/x/stop").exists()


def test_a_fleet_can_not_fill_this_disk(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring.sync_rules, "SPARE", 1 << 60)
    mirror, _ = mirror_of(*planted("results.json"))
    before = state(world)
    with pytest.raises(RunError) as refused:
        mirror.refresh(HOST)
    assert "free some space" in str(refused.value)
    assert state(world) == before


def test_what_is_lost_here_is_asked_for_anew(world: Path) -> None:
    mirror, _ = mirror_of(*planted("metrics.jsonl"), *planted("metrics.jsonl"))
    mirror.refresh(HOST)
    (world / "desk/runs/x/metrics.jsonl").unlink()
    assert (
        mirror.refresh(HOST) == NOW
        and (world / "desk/runs/x/metrics.jsonl").read_text() == "planted\n"
    )
