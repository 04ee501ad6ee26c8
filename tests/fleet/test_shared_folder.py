"""The lab's shared folder behaves as NFS and Lustre do, and not as a folder of one kernel."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fleet.lab import Lab, lab
from fleet.shared import CACHE, Server

LEASE = 3.0
ROOT = Path(__file__).parents[2]
READER = """import errno, fcntl, json, os, sys
scope = {"errno": errno, "fcntl": fcntl, "os": os}
for line in sys.stdin:
    try:
        print(json.dumps(eval(line, scope)), flush=True)
    except OSError as error:
        print(json.dumps(errno.errorcode[error.errno]), flush=True)
"""


class Process:
    """A process on a node, which evaluates expressions; the answer of a failed call is its errno's name."""

    def __init__(self, nodes: Lab, node: int) -> None:
        command = [
            *nodes.enter(node),
            f"PYTHONPATH={ROOT / 'python'}",
            sys.executable,
            "-c",
            READER,
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, expression: str) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{expression}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Lab]:
    with lab(2, lease=LEASE) as up:
        (up.shared / "folder").mkdir()
        yield up


@pytest.fixture
def pair(nodes: Lab) -> Iterator[list[Process]]:
    found = [Process(nodes, node) for node in (0, 1)]
    for process in found:
        assert process("os.chdir('/fsx/folder')") is None
    yield found
    for process in found:
        process.end()


def write(name: str, text: str, mode: str = "w") -> str:
    return f"open({name!r}, {mode!r}).write({text!r})"


def until(holds: Any, seconds: float) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds
        time.sleep(0.05)
    return time.monotonic() - began


def test_each_node_has_a_mount_for_itself(nodes: Lab, pair: list[Process]) -> None:
    assert all(" /fsx fuse " in nodes.run(node, "cat", "/proc/mounts").stdout for node in (0, 1))
    devices = [process("os.stat('/fsx').st_dev") for process in pair]
    assert devices[0] != devices[1]


def test_what_another_node_has_written_is_seen_late_and_by_an_open_at_once(
    pair: list[Process],
) -> None:
    here, there = pair
    here(write("late", "one"))
    assert there("os.stat('late').st_size") == 3 and there("open('late').read()") == "one"
    assert there("os.path.exists('absent')") is False
    here(write("late", " and two", "a"))
    here(write("absent", "now it is there"))
    assert there("os.stat('late').st_size") == 3, "attributes are cached"
    assert there("os.path.exists('absent')") is False, "names that were absent are cached"
    assert there("open('late').read()") == "one and two", (
        "whoever opens a file sees what was written before"
    )
    assert "absent" in there("os.listdir('.')") and there("os.path.exists('absent')") is True, (
        "as does whoever lists the folder"
    )
    assert there("os.path.exists('taken')") is there("os.path.exists('later')") is False
    here(write("taken", "x"))
    here(write("later", "x"))
    assert there("os.open('taken', os.O_CREAT | os.O_EXCL | os.O_WRONLY)") == "EEXIST", (
        "the server decides who creates it"
    )
    assert until(lambda: there("os.path.exists('later')"), CACHE + 20) > CACHE - 1


def test_a_dataset_that_another_node_has_made_is_found_at_once(pair: list[Process]) -> None:
    here, there = pair
    module = "__import__('trainfleet.storage.files').storage.files"
    store = f"{module}.LocalFiles(__import__('pathlib').Path('data/text'))"
    there(f"globals().update(read={store}.read, sizes={store}.sizes)")
    assert there("os.path.exists('data/text/manifest.json')") is False, "as the preflight looks"
    here("os.makedirs('data/text')")
    here(write("data/text/manifest.json", "{}"))
    assert there("os.path.exists('data/text/manifest.json')") is False, (
        "the name of its folder is still remembered"
    )
    assert there("read('manifest.json').decode()") == "{}"
    assert there("read('absent.json')") is None
    assert there("os.path.exists('data/text/train')") is False
    here("os.makedirs('data/text/train')")
    here(write("data/text/train/00000.bin", "tokens"))
    assert there("sizes('train')") == {"train/00000.bin": 6}


def test_a_file_that_was_replaced_is_seen_late_and_by_an_open_at_once(pair: list[Process]) -> None:
    here, there = pair
    here(write("state", "one"))
    before = there("os.stat('state').st_ino")
    assert there("open('state').read()") == "one"
    here(write("part", "another"))
    here("os.rename('part', 'state')")
    assert there("os.stat('state').st_ino") == before
    assert there("open('state').read()") == "another" and there("os.stat('state').st_ino") != before
    here(write("part", "a third"))
    here("os.rename('part', 'state')")
    assert there(
        "[entry.stat().st_size for entry in os.scandir('.') if entry.name == 'state']"
    ) == [7], "a listing is fresh"


@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_locks_hold_between_nodes_and_outlive_a_node_without_power(
    nodes: Lab, pair: list[Process], kind: str
) -> None:
    here, there = pair
    take = f"fcntl.{kind}(file, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    for process in pair:
        process(f"globals().update(file=open('{kind}', 'w'))")
    assert here(take) is None and there(take) == "EAGAIN"
    here.end()
    assert until(lambda: there(take) is None, 20) < LEASE, (
        "a process that died on a living node has no locks"
    )
    there(f"fcntl.{kind}(file, fcntl.LOCK_UN)")
    again = Process(nodes, 0)
    again(f"globals().update(file=open('/fsx/folder/{kind}', 'w'))")
    assert again(take) is None and there(take) == "EAGAIN"
    nodes.destroy(0)
    try:
        again.end()
        assert until(lambda: there(take) is None, LEASE + 20) > LEASE - 1
    finally:
        nodes.recreate(0)


@pytest.mark.parametrize("which", ["all", "one"])
def test_every_operation_waits_while_the_folder_stalls(
    nodes: Lab, pair: list[Process], which: str
) -> None:
    node = [] if which == "all" else [0]
    nodes.server.hold(*node)
    try:
        with ThreadPoolExecutor() as pool:
            asked = [
                pool.submit(process, write(f"stalled-{number}", "x"))
                for number, process in enumerate(pair)
            ]
            for number, answer in enumerate(asked):
                with suppress(NotYet):
                    assert answer.result(timeout=0.7) == 1 and which == "one" and number == 1
            nodes.server.go(*node)
            assert [answer.result(timeout=5) for answer in asked] == [1, 1]
    finally:
        nodes.server.go(*node)


def test_what_is_cut_off_for_longer_than_a_lease_has_lost_its_locks(
    nodes: Lab, pair: list[Process]
) -> None:
    take = "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    for process in pair:
        process("globals().update(file=open('cut', 'w'))")
    assert pair[0](take) is None
    nodes.server.hold(0)
    try:
        assert until(lambda: pair[1](take) is None, LEASE + 20) > LEASE - 1
    finally:
        nodes.server.go(0)


def test_a_node_that_shuts_down_while_the_folder_stalls_can_be_ended(
    nodes: Lab, pair: list[Process]
) -> None:
    nodes.server.hold()
    try:
        with ThreadPoolExecutor() as pool, suppress(ValueError):
            waits = pool.submit(pair[0], "os.listdir('/fsx/nothing')")
            time.sleep(0.3)
            nodes.destroy(0)
            waits.result(timeout=5)  # no answer: its process is gone
    finally:
        nodes.server.go()
        nodes.recreate(0)


def test_what_is_open_is_stale_after_a_remount_and_is_found_by_its_name(
    nodes: Lab, pair: list[Process]
) -> None:
    here, there = pair
    here(write("stale", "text"))
    for process in pair:
        process("globals().update(file=os.open('/fsx/folder/stale', os.O_RDONLY))")
    nodes.server.make_stale(0)
    assert here("os.pread(file, 4, 0).decode()") == here("os.listdir('.')") == "ESTALE"
    assert here("open('/fsx/folder/stale').read()") == "text" and "stale" in here(
        "os.listdir('/fsx/folder')"
    )
    assert there("os.pread(file, 4, 0).decode()") == "text"


def test_a_run_finds_its_folder_again_after_a_remount(nodes: Lab, pair: list[Process]) -> None:
    here, _ = pair
    here(
        "globals().update(untrusted_input=__import__('trainfleet.trust.untrusted_input').trust.untrusted_input, Path=__import__('pathlib').Path)"
    )
    here(
        "[os.makedirs('runs/one', exist_ok=True), untrusted_input.seal(Path('runs/one')), untrusted_input.stay()][0]"
    )
    append = "open('runs/one/metrics.jsonl', 'a', opener=untrusted_input.opener).write('line')"
    assert here(append) == 4
    nodes.server.make_stale(0)
    until(lambda: here(append) == 4, CACHE + 20)
    assert here("os.path.exists('.')") is True


def test_appends_of_two_nodes_overwrite_each_other_where_that_is_asked_for(
    nodes: Lab, pair: list[Process]
) -> None:
    for race, left in ((False, "ab"), (True, "b")):
        nodes.server.race_appends(race)
        for process in pair:
            process(
                f"globals().update(file=os.open('appended-{race}', os.O_WRONLY | os.O_CREAT | os.O_APPEND))"
            )
        for process, letter in zip(pair, "ab", strict=True):
            assert process(f"os.write(file, {letter.encode()!r})") == 1
        assert pair[0](f"open('appended-{race}').read()") == left
    nodes.server.race_appends(False)


def test_operations_fail_for_a_while_and_fsync_takes_long(nodes: Lab, pair: list[Process]) -> None:
    nodes.server.fail(0, errno.EIO)
    assert pair[0](write("failed", "x")) == "EIO" and pair[1](write("failed", "x")) == 1
    nodes.server.fail(0, 0)
    assert pair[0](write("failed", "x")) == 1
    nodes.server.delay_fsync(0.5)
    began = time.monotonic()
    pair[0]("os.fsync(os.open('failed', os.O_WRONLY))")
    assert time.monotonic() - began >= 0.5
    nodes.server.delay_fsync(0)


def test_files_are_their_makers(nodes: Lab) -> None:
    nodes.run(0, "install", "-d", "-o", "trainer", "-m", "2770", "/fsx/mine")
    nodes.run(
        0,
        "su",
        "trainer",
        "-c",
        "umask 027; cd /fsx/mine; echo x > file; mkdir folder; ln -s file link; ln file second; mv second third",
    )
    told = nodes.run(
        1,
        "stat",
        "-c",
        "%n %U %a %h",
        "/fsx/mine/file",
        "/fsx/mine/folder",
        "/fsx/mine/link",
        "/fsx/mine/third",
    ).stdout
    assert [line.split("/")[-1] for line in told.splitlines()] == ["file trainer 640 2", "folder trainer 2750 2",
                                                                  "link trainer 777 1", "third trainer 640 2"]  # fmt: skip
    assert nodes.run(1, "su", "guest", "-c", "cat /fsx/mine/file", check=False).returncode == 1


def test_a_server_that_does_not_know_a_word_says_so(nodes: Lab) -> None:
    assert isinstance(nodes.server, Server)
    with pytest.raises(OSError, match="unknown word"):
        nodes.server._tell("dance")


START = (
    "[*__import__('trainfleet.watch.verdict', fromlist=['start_now']).start_now(__import__('types').SimpleNamespace("
    "logs=[__import__('pathlib').Path(f'node-{node}.log') for node in (0, 1)], job_log=__import__('pathlib').Path('job.log')))"
    ".ends.values()]"
)


def test_an_attempt_begins_behind_all_that_other_nodes_have_logged(pair: list[Process]) -> None:
    """Else a verdict would take the last attempt's failure for this one's."""
    here, there = pair
    assert here(START) == []  # what takes long, the imports, is done
    there(write("node-0.log", "begins"))
    here("os.listdir('.')")
    assert (
        here("os.stat('node-0.log').st_size") == 6 and here("os.path.exists('node-1.log')") is False
    )
    there(write("node-0.log", ", and fails", "a"))
    there(write("node-1.log", "fails too"))
    assert here(START) == [17, 9]
