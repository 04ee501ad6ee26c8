"""A run folder in S3: every machine comes to see the same files, for the price of what is new, whatever dies or fails between."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import trainfleet
from s3server import Application, busy, serve
from trainfleet.backends.run_storage import BucketPlace
from trainfleet.run import run_folder
from trainfleet.storage import folder_sync, s3, s3_sync_agent
from trainfleet.storage.folder_sync import PART, STATE, FolderSync, travels
from trainfleet.trust.errors import BackendError, RunError, S3Error

ROOT = "s3://bucket/some"
RUN = f"{ROOT}/runs/demo"


class Counting:
    """The server's application; what it was asked, and what it is to refuse."""

    def __init__(self, application: Application) -> None:
        self.application, self.refuse, self.draw = application, 0.0, random.Random(1)
        self.asked, self.bytes, self.lock = list[str](), {"PUT": 0, "GET": 0}, threading.Lock()

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environment["REQUEST_METHOD"], environment["PATH_INFO"]
        with self.lock:
            self.asked.append(f"{method} {path}")
            if self.draw.random() < self.refuse:
                return busy(start)
        answer = b"".join(self.application(environment, start))
        if method in self.bytes:
            self.bytes[method] += (
                len(answer) if method == "GET" else int(environment.get("CONTENT_LENGTH") or 0)
            )
        return [answer]

    def forget(self) -> None:
        self.asked, self.bytes = [], {"PUT": 0, "GET": 0}


@pytest.fixture
def server() -> Iterator[Counting]:
    made: list[Counting] = []

    def wrap(application: Application) -> Application:
        made.append(Counting(application))
        return made[0]

    with serve(wrap):
        made[0].forget()
        yield made[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine where somebody looks, as the current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node's run folder."""
    folder = tmp_path / "node" / "runs" / "demo"
    folder.mkdir(parents=True)
    return folder


def place() -> BucketPlace:
    return BucketPlace(run_folder.run_of("demo"), ROOT, "set")


def write(folder: Path, name: str, content: str | bytes, mode: str = "w") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with open(folder / name, f"{mode[0]}b") as file:
        file.write(content if isinstance(content, bytes) else content.encode())


def push(folder: Path) -> None:
    FolderSync(folder, RUN).push(s3_sync_agent.is_node_s)


def files(folder: Path) -> dict[str, bytes]:
    return {
        name: path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and travels(name := str(path.relative_to(folder))) is not None
    }


def test_what_a_node_writes_is_seen_elsewhere_under_the_same_names(
    server: Counting, here: Path, node: Path
) -> None:
    for name in ("results.json", "metrics.jsonl", "events/node-0-1.jsonl", "logs/node-0.log", "logs/stacks-rank-0.txt",
                 "plots/loss.png", "tensorboard/events.out.tfevents.1", "heartbeats/node-0", "heartbeats/attempts/1"):  # fmt: skip
        write(node, name, f'{{"name": "{name}"}}\n')
    for name in (
        "lock",
        "checkpoints/step-00000004/committed.json",
        "report.html",
        ".hidden",
        "logs/.new",
        "stray.txt",
    ):
        write(node, name, "stays")
    push(node)
    place().refresh()
    assert files(here / "runs/demo") == files(node) and len(files(node)) == 9
    assert (
        not (here / "runs/demo/report.html").exists()
        and not (here / "runs/demo/checkpoints").exists()
    )


def test_a_growing_log_costs_its_new_bytes(server: Counting, here: Path, node: Path) -> None:
    first = random.Random(1).randbytes(3 * PART + 1000)
    write(node, "logs/node-0.log", first)
    push(node)
    place().refresh()
    server.forget()
    write(node, "logs/node-0.log", b"a line\n", "a")
    push(node)
    place().refresh()
    assert server.bytes["PUT"] < PART and server.bytes["GET"] < 5000, server.asked
    assert (here / "runs/demo/logs/node-0.log").read_bytes() == first + b"a line\n"
    server.forget()
    push(node)
    place().refresh()
    assert not [request for request in server.asked if request.startswith("PUT")]
    assert len(server.asked) <= 4, (
        f"two looks at nothing new, each a listing or two: {server.asked}"
    )


def test_a_file_that_is_cut_back_is_cut_back_elsewhere(
    server: Counting, here: Path, node: Path
) -> None:
    write(node, "metrics.jsonl", b"x" * 2 * PART)
    push(node)
    place().refresh()
    run_folder.write_atomic(node / "metrics.jsonl", '{"step": 1}\n')
    push(node)
    place().refresh()
    assert (here / "runs/demo/metrics.jsonl").read_text() == '{"step": 1}\n'
    write(node, "metrics.jsonl", b'{"step": 2}\n', "a")
    push(node)
    place().refresh()
    assert (here / "runs/demo/metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert len(s3.list_objects(f"{RUN}/metrics.jsonl/")) == 1, "what was cut off is not kept"
    run_folder.write_atomic(node / "metrics.jsonl", "")
    push(node)
    place().refresh()
    assert (here / "runs/demo/metrics.jsonl").read_text() == ""


def test_a_file_that_is_replaced_under_the_same_inode_is_replaced_elsewhere(
    server: Counting, here: Path, node: Path
) -> None:
    """File systems give a freed inode to the next file: the second of two replacements can have the one of the first file."""
    for content in (b"a" * 10, b"b" * 20, b"b" * 2 * PART, b"c" * 3 * PART, b"c" * 3 * PART + b"d"):
        write(node, "metrics.jsonl", content)  # cuts it back and writes it again
        push(node)
        place().refresh()
        assert (here / "runs/demo/metrics.jsonl").read_bytes() == content


def test_a_new_machine_goes_on_with_the_log_of_the_one_before(
    server: Counting, here: Path, tmp_path: Path
) -> None:
    for number, words in enumerate(("first\n", "second\n", "third\n")):
        write(tmp_path / f"machine-{number}", "logs/node-0.log", words)
        push(tmp_path / f"machine-{number}")
    place().refresh()
    assert (here / "runs/demo/logs/node-0.log").read_text() == "first\nsecond\nthird\n"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_to_the_folder_every_copy_becomes_the_same(
    server: Counting, here: Path, node: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files grow, are replaced and cut back; pushes and looks are cut off at any request; S3 is busy one time in ten."""
    monkeypatch.setattr(folder_sync, "PART", 50)
    monkeypatch.setattr(folder_sync, "ROOM", 3)
    draw, server.refuse = random.Random(seed), 0.1
    names = (
        "metrics.jsonl",
        "logs/node-0.log",
        "results.json",
        "events/node-0-1.jsonl",
        "tensorboard/a",
    )

    class Cut(Exception): ...

    def cut_off(do: Callable[[], None]) -> None:
        left = draw.choice([1, 2, 3, 5, 10**6])

        def request(real: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*words: Any, **more: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0 and draw.random() < 0.5:
                    raise Cut
                answer = real(*words, **more)
                if left == 0:
                    raise Cut
                return answer

            return counted

        with pytest.MonkeyPatch.context() as patch:
            for name in ("write", "read_range", "list_objects", "remove_all"):
                patch.setattr(s3, name, request(getattr(s3, name)))
            if (
                draw.random() < 0.3 and do is not node_s
            ):  # a look that is not shown all that is there
                whole = s3.list_objects
                patch.setattr(
                    s3,
                    "list_objects",
                    lambda prefix: [found for found in whole(prefix) if draw.random() < 0.7],
                )
            with suppress(Cut):
                do()

    def node_s() -> None:
        push(node)

    for _ in range(60):
        name, size = draw.choice(names), draw.randrange(200)
        match draw.choice(["grow", "grow", "replace", "push", "look"]):
            case "grow":
                write(node, name, draw.randbytes(size), "a")
            case "replace":
                (node / name).parent.mkdir(parents=True, exist_ok=True)
                run_folder.write_atomic(node / name, "x" * size)
            case "push":
                cut_off(node_s)
            case "look":
                cut_off(lambda: place().refresh())
    link = FolderSync(node, RUN)
    link.push(s3_sync_agent.is_node_s)
    while link.waits(s3_sync_agent.is_node_s):
        link.push(s3_sync_agent.is_node_s)
    place().refresh()
    assert files(here / "runs/demo") == files(node)


def test_a_stop_reaches_a_node_once_and_is_gone_when_it_was_obeyed(
    server: Counting, here: Path, node: Path
) -> None:
    link = FolderSync(node, RUN)
    for ask in (
        place().ask_to_stop,
        *[lambda: s3.write(f"{RUN}/asked/stop", b"")] * 2,
    ):  # by a person, and by launchers
        ask()
        link.pull(s3_sync_agent.is_asked, "asked/")
        assert (node / "stop").exists()
        link.push(s3_sync_agent.is_node_s, s3_sync_agent.is_obeyed)
        (node / "stop").unlink()  # as rank 0 does
        link.pull(s3_sync_agent.is_asked, "asked/")
        assert not (node / "stop").exists(), "it was obeyed"
        link.push(s3_sync_agent.is_node_s, s3_sync_agent.is_obeyed)
        assert s3.read(f"{RUN}/asked/stop") is None
        link.pull(s3_sync_agent.is_asked, "asked/")


def test_what_sigterm_leaves_on_a_node_stays_there(
    server: Counting, here: Path, node: Path
) -> None:
    """An engine that ends an attempt sends it, and the next attempt must not be asked to stop."""
    link = FolderSync(node, RUN)
    write(node, "stop", "")
    link.push(s3_sync_agent.is_node_s, s3_sync_agent.is_obeyed)
    assert s3.read(f"{RUN}/asked/stop") is None


def test_the_launcher_s_words_reach_the_nodes_and_theirs_reach_it(
    server: Counting, here: Path, node: Path
) -> None:
    s3.write(f"{RUN}/asked/stop", b"of an earlier launch")
    mine, launcher = run_folder.run_of("demo"), place()
    launcher.refresh()
    launcher.lead()
    mine.stop.unlink()
    for name, text in {"config.yaml": "name: demo\n", "results.json": '{"restarts": 1}', "heartbeats/attempts/3": "{}",
                       "heartbeats/dump": "12", "events/launcher-a.jsonl": "{}\n", "handle.json": "{}"}.items():  # fmt: skip
        write(mine.folder, name, text)
    launcher.refresh()
    there = FolderSync(node, RUN)
    there.pull(s3_sync_agent.is_asked, "asked/")
    there.pull(lambda name: bool(s3_sync_agent.RESTORED.fullmatch(name)))
    assert sorted(files(node)) == [
        "config.yaml",
        "heartbeats/attempts/3",
        "heartbeats/dump",
        "results.json",
    ]
    run_folder.write_atomic(node / "results.json", '{"restarts": 1, "steps": 4}')
    write(node, "heartbeats/attempts/4", "{}")
    there.push(s3_sync_agent.is_node_s)
    launcher.refresh()
    assert (
        mine.read_results() == {"restarts": 1, "steps": 4}
        and (mine.folder / "heartbeats/attempts/4").exists()
    )
    mine.update_results(status="finished")
    launcher.refresh()
    assert s3.read(f"{RUN}/results.json") == mine.results.read_bytes()


def test_a_look_leaves_the_launcher_of_this_machine_and_the_config_here_alone(
    server: Counting, here: Path, node: Path
) -> None:
    s3.write(f"{RUN}/asked/config.yaml", b"name: other\n")
    s3.write(f"{RUN}/results.json", b"{}")
    run = run_folder.run_of("demo")
    write(run.folder, "config.yaml", "name: demo\n")
    with run_folder.take_lock(run.folder) or pytest.fail("locked"):
        place().refresh()
        assert not run.results.exists()
    place().refresh()
    assert run.results.exists() and run.config.read_text() == "name: demo\n"


def test_nodes_at_work_are_seen_by_s3_s_clock(
    server: Counting, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not place().is_running()
    s3.write(f"{RUN}/nodes/0", b"")
    assert place().is_running()
    now = s3.clock(RUN)
    monkeypatch.setattr(s3, "clock", lambda address: now + 3600)
    assert not place().is_running()


def test_what_lies_in_the_bucket_is_listed_and_removed_and_nothing_else(
    server: Counting, here: Path
) -> None:
    for name in (
        "runs/demo/results.json",
        "runs/demo/logs/node-0.log/1-00000000",
        "checkpoints/demo/a",
        "runs/demo2/results.json",
    ):
        s3.write(f"{ROOT}/{name}", b"four")
    bucket = BucketPlace(
        run_folder.run_of("demo"), ROOT, "set", others=[f"{ROOT}/checkpoints/demo"]
    )
    assert bucket.folders() == {RUN: 8, f"{ROOT}/checkpoints/demo": 4}
    bucket.remove(bucket.folders())
    assert [found.address for found in s3.list_objects(ROOT)] == [f"{ROOT}/runs/demo2/results.json"]


HOSTILE = [
    "logs/../../../../victim", "../victim", "checkpoints/step-00000004/committed.json", "lock", ".link.json", "report.html",
    "logs/node-0.log", "logs/node-0.log/1-0000000٠", "logs/node-0.log/1-00000000/x", "asked/results.json", "stop", "config.yaml",
    "events/../config.yaml/1-00000000", "metrics.jsonl/1-00000001", "logs/.hidden.log/1-00000000", "x" * 900, "nodes/0",
]  # fmt: skip


def test_a_hostile_bucket_writes_nothing_but_what_a_run_folder_has(
    server: Counting, here: Path
) -> None:
    for name in HOSTILE:
        if ".." not in name.split("/"):
            s3.write(f"{RUN}/{name}", b"evil")
    place().refresh()
    assert [path for path in here.rglob("*") if path.is_file()] == []
    for name in HOSTILE:
        if ".." in name.split("/"):
            s3.write(f"{RUN}/{name}", b"evil")
            with pytest.raises(BackendError, match="S3 sent an invalid response"):
                place().refresh()
            s3.remove(f"{RUN}/{name}")


def test_it_can_not_fill_this_disk_or_follow_a_link(
    server: Counting, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.write(f"{RUN}/results.json", bytes(17 << 20))
    s3.write(f"{RUN}/logs/node-0.log/1-00000000", b"evil")
    outside = here / "outside"
    outside.mkdir()
    (here / "runs/demo").mkdir(parents=True)
    (here / "runs/demo/logs").symlink_to(outside)
    with pytest.raises(RunError, match="is not a plain file or folder"):
        place().refresh()
    (here / "runs/demo/logs").unlink()
    monkeypatch.setattr(folder_sync.sync_rules, "SPARE", 1 << 60)
    with pytest.raises(RunError, match="can't write"):
        place().refresh()
    assert not list(outside.iterdir()) and not (here / "runs/demo/results.json").exists()


def test_a_state_that_is_none_is_made_anew(server: Counting, here: Path, node: Path) -> None:
    write(node, "results.json", "{}")
    push(node)
    for text in ('{"address": 5}', f'{{"address": "{RUN}", "sent": [], "brought": {{}}}}',
                 f'{{"address": "{RUN}", "sent": {{"a": {{"b": 1}}}}, "brought": {{}}}}'):  # fmt: skip
        write(here, f"runs/demo/{STATE}", text)
        place().refresh()
        assert (here / "runs/demo/results.json").exists()


WORK = """
import pathlib, sys, time
end = pathlib.Path("end")
print("config:", pathlib.Path("runs/demo/config.yaml").read_text(), flush=True)
for number in range(10**6):
    print("line", number, flush=True)
    pathlib.Path("runs/demo/metrics.jsonl").open("a").write(f'{{"step": {number}}}\\n')
    if end.exists() or pathlib.Path("runs/demo/stop").exists():
        break
    time.sleep(0.05)
sys.exit(3)
"""


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts node 0 of a job, which prints lines until the file `end` is there."""
    monkeypatch.setenv("PYTHONPATH", str(Path(trainfleet.__file__).parents[1]))
    monkeypatch.setenv(s3_sync_agent.BUCKET, ROOT)
    monkeypatch.setenv(s3_sync_agent.RUN, "demo")
    (tmp_path / "machine").mkdir()
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        words = [
            sys.executable,
            "-m",
            "trainfleet.node.supervisor",
            "runs/demo/logs/node-0.log",
            "--",
            sys.executable,
            "-c",
            WORK,
        ]
        started.append(subprocess.Popen(words, cwd=tmp_path / "machine"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def uplinks(supervisor: subprocess.Popen[bytes]) -> list[int]:
    words = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
    return [
        int(pid)
        for pid in words
        if b"trainfleet.storage.s3_sync_agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def seen(here: Path, text: str, name: str = "logs/node-0.log") -> Callable[[], bool]:
    def look() -> bool:
        with suppress(BackendError, S3Error):
            place().refresh()
        path = here / "runs/demo" / name
        return path.exists() and text in path.read_text()

    return look


def test_a_node_s_uplink_that_is_killed_goes_on_and_loses_nothing(
    server: Counting, here: Path, tmp_path: Path, machine: Callable[[], subprocess.Popen[bytes]]
) -> None:
    s3.write(f"{RUN}/asked/config.yaml", b"name: demo")
    process = machine()
    until(seen(here, "line 5\n"))
    assert place().is_running()
    for line in ("line 60\n", "line 120\n"):
        for pid in uplinks(process):
            os.kill(pid, signal.SIGKILL)
        until(seen(here, line))
    (tmp_path / "machine/end").touch()
    assert process.wait(30) == 3, "the command's own exit code"
    place().refresh()
    there = tmp_path / "machine/runs/demo"
    assert (
        files(here / "runs/demo").items() >= files(there).items()
        and "uplink ended with exit code -9" in (there / "logs/node-0.log").read_text()
    )
    assert (
        "config: name: demo" in (here / "runs/demo/logs/node-0.log").read_text()
        and not place().is_running()
    )


@pytest.mark.thorough
def test_while_s3_is_away_the_command_goes_on_and_a_stop_comes_when_it_is_back(
    server: Counting,
    here: Path,
    tmp_path: Path,
    machine: Callable[[], subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3.write(f"{RUN}/asked/config.yaml", b"name: demo")
    process, log = machine(), tmp_path / "machine/runs/demo/logs/node-0.log"
    until(seen(here, "line 1\n"))
    server.refuse = 1.0
    until(lambda: "can't update S3" in log.read_text())
    before = log.read_text().count("line ")
    until(lambda: log.read_text().count("line ") > before + 20)
    server.refuse = 0.0
    place().ask_to_stop()
    assert process.wait(60) == 3
    place().refresh()
    assert "S3 is up to date again" in (here / "runs/demo/logs/node-0.log").read_text()
    assert files(here / "runs/demo").items() >= files(tmp_path / "machine/runs/demo").items() - {
        ("stop", b"")
    }


def test_what_was_written_last_arrives_when_the_supervisor_is_killed(
    server: Counting, here: Path, tmp_path: Path, machine: Callable[[], subprocess.Popen[bytes]]
) -> None:
    s3.write(f"{RUN}/asked/config.yaml", b"name: demo")
    process = machine()
    until(seen(here, "line 5\n"))
    process.kill()
    process.wait()
    last = (tmp_path / "machine/runs/demo/logs/node-0.log").read_text().splitlines()[-1]
    until(seen(here, last))
    until(lambda: not place().is_running())


def test_another_launcher_is_refused_while_one_renews_its_lease(
    server: Counting, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.write(
        f"{RUN}/head.json", b'{"host": "desk", "pid": 1, "term": 1, "time": 5.0, "code": null}'
    )
    place().refresh()
    with pytest.raises(BackendError, match="is already running") as caught:
        place().lead()
    assert "desk" in caught.value.where
    now = s3.clock(RUN)
    monkeypatch.setattr(s3, "clock", lambda address: now + 60)
    place().lead()


def test_a_node_that_gets_nothing_from_s3_says_so_and_ends(
    server: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(s3_sync_agent.BUCKET, "s3://nowhere/some")
    monkeypatch.setenv(s3_sync_agent.RUN, "demo")
    monkeypatch.setattr(s3_sync_agent, "TO_BEGIN", 0.0)
    monkeypatch.chdir(tmp_path)
    assert s3_sync_agent.main(["restore", "runs/demo/logs/node-0.log", "runs/demo"]) == 1
