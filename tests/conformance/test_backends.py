"""What every backend must do, the same cases on each: plan, submit, status, stop, exit codes, logs, and words that arrive as they are."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.lab import lab
from trainfleet.backends import BACKENDS
from trainfleet.backends.base import Backend, Status
from trainfleet.config import Settings, load
from trainfleet.errors import BackendError
from trainfleet.plan.job import Job
from trainfleet.plan.request import Request

ROOT = Path(__file__).parents[2]
HARD = (
    "two words",
    "a'quote",
    'a"double"',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME",
    "line one\nline two",
    "*",
    "~",
    "",
    "ü;|&<>",
    "-n",
)
# Runs on a node: says what it was given, then does what its first word tells it to.
PROBE = """
import json, os, signal, sys, time
node = os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK", "?")
given = {name: value for name, value in os.environ.items() if name.startswith("PROBE_")}
print(json.dumps({"node": node, "words": sys.argv[1:], "given": given, "folder": os.getcwd(), "nodes": os.environ.get("NODES")}), flush=True)
match sys.argv[1]:
    case "exit":
        sys.exit(int(sys.argv[2]) if node == sys.argv[3] else 0)
    case "die":
        os.kill(os.getpid(), signal.SIGKILL if node == "1" else signal.SIG_DFL)
    case "stay":
        if not os.fork():
            os.setsid()  # a grandchild that leaves the session
        time.sleep(300)
    case "polite":
        signal.signal(signal.SIGTERM, lambda *_: (print("finishing", flush=True), sys.exit(0)))
        time.sleep(300)
    case "meet":
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print(f"met {dist.get_rank()} of {dist.get_world_size()}", flush=True)
        dist.barrier()
        dist.destroy_process_group()
"""


class Place:
    """A backend under test, where its nodes leave their logs, and who runs there."""

    def __init__(self, name: str, backend: Backend, folder: Path, running: Callable[[], list[str]]) -> None:
        self.name, self.backend, self.folder, self.running = name, backend, folder, running

    def plan(self, *words: str, nodes: int = 2, torchrun: bool = False, **environment: str) -> Request:
        job = Job("train" if torchrun else "tokenize", "probe", Path("runs/probe"), nodes, 1, "probe", words, torchrun)
        return self.backend.plan(replace(job, environment=environment))

    def said(self, request: Request, node: int) -> str:
        return (self.folder / request.commands[node].log).read_text()

    def records(self, request: Request) -> list[dict[str, Any]]:
        """What the probe of each node was given."""
        lines = [
            line for node in range(len(request.commands)) for line in self.said(request, node).splitlines() if '"words"' in line
        ]
        return [json.loads(line.partition(" | ")[2]) for line in lines]

    def until_ended(self, handle: Any, seconds: float = 60) -> Status:
        deadline = time.monotonic() + seconds
        while (status := self.backend.status(handle)).running and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not status.running, status
        return status

    def until_said(self, request: Request, text: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if all(text in self.said(request, node) for node in range(len(request.commands))):
                    return
            except FileNotFoundError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"{text!r} never came")


def processes_of(folder: Path) -> list[str]:
    """Processes of this machine that run the probe in this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_text().replace("\0", " ")
            if (entry / "cwd").readlink() == folder and " -m probe" in command:
                found.append(f"{entry.name} {command}")
        except OSError:
            continue
    return found


def config_of(backend: str, folder: Path, **fleet: Any) -> Any:
    path = folder / f"{backend}.yaml"
    path.write_text(yaml.safe_dump({"name": "probe", "fleet": {"backend": backend, "nodes": 2} | fleet}))
    return load(Settings(path))[0]


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "python"))
        if request.param == "local":
            patch.chdir(folder)
            (folder / "probe.py").write_text(PROBE)
            yield Place("local", BACKENDS["local"](config_of("local", folder)), folder, lambda: processes_of(folder))
            return
        with lab(2) as nodes:  # this process plays the head of the fleet
            patch.setenv("TRAINFLEET_HEAD", "1")
            patch.chdir(nodes.shared)
            (nodes.shared / "probe.py").write_text(PROBE)
            fleet = {"hosts": nodes.hosts(), "ssh": nodes.ssh(), "shared_folder": "/fsx", "python": sys.executable}
            backend = BACKENDS["ssh"](config_of("ssh", folder, **fleet))

            def running() -> list[str]:
                return [f"node{node} {pid}" for node in range(2) for pid in nodes.processes(node, " -m probe")]

            yield Place("ssh", backend, nodes.shared, running)


@pytest.fixture(autouse=True)
def clean(place: Place) -> Iterator[None]:
    yield
    for log in (place.folder / "runs/probe/logs").glob("*"):
        log.unlink()
    assert not place.running() and not list(place.folder.rglob("pwned"))


def test_exit_codes_come_back_by_node(place: Place) -> None:
    handle = place.backend.submit(place.plan("exit", "7", "1"))
    status = place.until_ended(handle)
    assert status.exit_codes == {0: 0, 1: 7} and status.failed and not status.lost
    place.backend.stop(handle)


def test_a_job_that_ends_well_is_no_failure(place: Place) -> None:
    handle = place.backend.submit(place.plan("exit", "0", "0"))
    status = place.until_ended(handle)
    assert status.exit_codes == {0: 0, 1: 0} and not status.failed
    place.backend.stop(handle)
    place.backend.stop(handle)


def test_a_killed_command_is_told_by_its_signal(place: Place) -> None:
    request = place.plan("die")
    handle = place.backend.submit(request)
    assert place.until_ended(handle).exit_codes == {0: 0, 1: 137}
    place.backend.stop(handle)
    assert "was killed by signal 9" in place.said(request, 1)


def test_the_plan_is_what_runs(place: Place) -> None:
    request = place.plan("exit", "0", "0", PROBE_ME="yes")
    assert place.backend.plan(request.job) == request, "planning twice is planning once"
    assert "PROBE_ME=yes" in request.commands[0].shell() and " -m probe exit 0 0" in request.commands[1].shell()
    handle = place.backend.submit(request)
    place.until_ended(handle)
    assert [record["node"] for record in place.records(request)] == ["0", "1"]
    assert all(record["nodes"] == "2" and record["given"]["PROBE_ME"] == "yes" for record in place.records(request))


def test_words_and_values_arrive_as_they_are(place: Place) -> None:
    environment = {f"PROBE_{number}": word for number, word in enumerate(HARD)}
    request = place.plan("exit", "0", "0", *HARD, **environment)
    place.until_ended(place.backend.submit(request))
    for record in place.records(request):
        assert record["words"][3:] == list(HARD)
        assert record["given"] == environment


def test_every_line_is_in_the_log_with_its_time(place: Place) -> None:
    request = place.plan("exit", "0", "0")
    place.until_ended(place.backend.submit(request))
    for node in (0, 1):
        who, clock, bar, text = place.said(request, node).splitlines()[0].split(maxsplit=3)
        assert (who, bar) == ("agent", "|") and len(clock) == 12 and json.loads(text)["node"] == str(node)


def test_it_runs_in_the_folder_that_has_the_runs(place: Place) -> None:
    request = place.plan("exit", "0", "0")
    place.until_ended(place.backend.submit(request))
    assert {record["folder"] for record in place.records(request)} == {"/fsx" if place.name == "ssh" else str(place.folder)}


def test_stop_leaves_nothing_and_may_be_said_twice(place: Place) -> None:
    request = place.plan("stay")
    handle = place.backend.submit(request)
    place.until_said(request, '"words"')
    assert place.backend.status(handle).running and len(place.running()) >= 2
    place.backend.stop(handle)
    if place.name == "ssh":  # by its environment, also what has left the session
        assert not place.running()
    place.backend.stop(handle)
    for line in place.running():  # on one machine a grandchild that left the session is not followed
        os.kill(int(line.split()[0]), 9)
    time.sleep(0.1)


def test_asked_to_stop_it_may_finish_what_it_does(place: Place) -> None:
    request = place.plan("polite")
    handle = place.backend.submit(request)
    place.until_said(request, '"words"')
    place.backend.ask_to_stop(handle)
    assert place.until_ended(handle, 20).exit_codes == {0: 0, 1: 0}
    assert "finishing" in place.said(request, 0)


def test_ranks_meet_and_number_the_nodes_in_order(place: Place) -> None:
    request = place.plan("meet", torchrun=True)
    handle = place.backend.submit(request)
    assert place.until_ended(handle, 120).exit_codes == {0: 0, 1: 0}, place.said(request, 0)
    for node in (0, 1):
        assert f"met {node} of 2" in place.said(request, node)
        assert f"rank {node} " in place.said(request, node)


def test_another_attempt_is_the_same_job_elsewhere(place: Place) -> None:
    request = place.plan("exit", "0", "0")
    other = place.backend.again([request.job], {})
    assert other.job == request.job
    assert place.until_ended(place.backend.submit(other)).exit_codes == {0: 0, 1: 0}


def test_more_nodes_than_there_are_is_refused_at_plan_time(place: Place) -> None:
    if place.name == "local":  # this machine plays as many as it is asked to
        assert len(place.plan("exit", "0", "0", nodes=3).commands) == 3
        return
    with pytest.raises(BackendError, match="3 nodes are wanted, 2 of 2 hosts"):
        place.plan("exit", "0", "0", nodes=3)
