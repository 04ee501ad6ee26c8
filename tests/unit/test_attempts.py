"""How often, how long apart and on which nodes a failed job is tried again; the backend's attempts end as they are told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from trainfleet.backends.base import Status
from trainfleet.config import Settings, load
from trainfleet.errors import BackendError
from trainfleet.plan.job import Job
from trainfleet.plan.request import Command, Request
from trainfleet.recipes import FOLDER
from trainfleet.runs import Run
from trainfleet.watch import attempts, follow
from trainfleet.watch.attempts import persevere
from trainfleet.watch.budget import Budget
from trainfleet.watch.follow import Follower
from trainfleet.watch.interrupts import Interrupts
from trainfleet.watch.verdict import Verdict

KILLED = {1: 137}


class Script:
    """A backend on hosts a, b, c ...; attempt n ends with the n-th of `ends`, and the n-th of `words` in node 1's log."""

    name, shares_disk = "script", True

    def __init__(self, run: Run, ends: Sequence[Status], words: Sequence[str] = (), hosts: str = "abc") -> None:
        self.run, self.ends, self.words, self.hosts = run, list(ends), list(words), hosts
        self.used: list[tuple[str, ...]] = []
        self.attempts: list[str] = []
        self.saves: set[int] = set()  # attempts that commit a checkpoint

    def request(self, job: Job, hosts: str) -> Request:
        commands = [
            Command(node, ("x",), {}, self.run.logs / f"node-{node}.log", host) for node, host in enumerate(hosts[: job.nodes])
        ]
        return Request(job, tuple(commands))

    def submit(self, request: Request) -> int:
        number = len(self.used)
        self.used.append(tuple(command.host for command in request.commands))
        self.attempts.append(request.commands[0].environment["TRAINFLEET_ATTEMPT"])
        if number in self.saves:
            self.run.record("checkpointed", step=number)
        if number < len(self.words):
            log = request.commands[1].log
            log.parent.mkdir(exist_ok=True)
            with open(log, "a") as file:
                file.write(f"rank 1  10:00:00.000 | {self.words[number]}\n")
        return number

    def status(self, handle: int) -> Status:
        return self.ends[min(handle, len(self.ends) - 1)]

    def ask_to_stop(self, handle: int) -> None: ...
    def stop(self, handle: int) -> None: ...

    def again(self, jobs: Sequence[Job], broken: Mapping[str, str]) -> Request:
        sound = "".join(host for host in self.hosts if host not in broken)
        for job in jobs:
            if job.nodes <= len(sound):
                return self.request(job, sound)
        raise BackendError("too few nodes")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(attempts, "BACK_OFF", (0.0,))
    monkeypatch.setattr(attempts, "ASK_AGAIN", 0.01)
    monkeypatch.setattr(follow, "POLL", 0.0)
    return Run(tmp_path)


def job(run: Run, nodes: int = 2) -> Job:
    return Job("train", "x", run.folder, nodes, 1, "m", (), True)


def play(run: Run, backend: Script, jobs: Sequence[Job] = ()) -> tuple[Verdict | None, list[str]]:
    said: list[str] = []
    config, _ = load(Settings(FOLDER / "first-run.yaml"))
    follower = Follower(backend, run, Interrupts(), lambda: None, said.append, Budget(run, config))
    jobs = jobs or [job(run)]
    return persevere(follower, backend.request(jobs[0], backend.hosts), jobs, lambda job: None), said


OK = Status(False, {0: 0, 1: 0})
BAD = Status(False, {0: 1, 1: 137})


def test_a_job_that_ends_well_is_run_once(run: Run) -> None:
    backend = Script(run, [OK])
    assert play(run, backend)[0] is None and len(backend.used) == 1


def test_a_killed_node_is_tried_again_with_a_number_of_its_own(run: Run) -> None:
    backend = Script(run, [BAD, OK])
    verdict, said = play(run, backend)
    assert verdict is None and backend.attempts == ["1", "2"] and "killed" in said[0]
    assert run.read_results()["restarts"] == 1
    assert [event["event"] for event in run.read_events()] == ["verdict", "restarted"]
    backend = Script(run, [OK])
    play(run, backend)
    assert backend.attempts == ["3"], "also across launches: a rank of an older one must see that its time is over"


def test_four_attempts_without_a_checkpoint_are_the_last(run: Run) -> None:
    backend = Script(run, [BAD])
    verdict, _ = play(run, backend)
    assert verdict and verdict.cause == "killed" and len(backend.used) == 4


def test_a_checkpoint_begins_the_count_anew(run: Run) -> None:
    backend = Script(run, [BAD])
    backend.saves = {2, 4}
    assert play(run, backend)[0] and len(backend.used) == 4 + 4


@pytest.mark.parametrize("words, cause", [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB.", "device-memory"),
    ("OSError: [Errno 28] No space left on device", "disk"),
    ("the loss or its gradients were not finite in step 3", "nan"),
])  # fmt: skip
def test_what_would_only_happen_again_is_not_tried_again(run: Run, words: str, cause: str) -> None:
    backend = Script(run, [Status(False, {0: 1, 1: 1})], [words])
    verdict, _ = play(run, backend)
    assert verdict and (verdict.cause, verdict.rank, verdict.node) == (cause, 1, 1) and len(backend.used) == 1


def test_a_broken_device_is_left_out_for_a_spare(run: Run) -> None:
    backend = Script(
        run, [Status(False, {0: 1, 1: 1}), OK], ["torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"]
    )
    assert play(run, backend)[0] is None
    assert backend.used == [("a", "b"), ("a", "c")]


def test_without_a_spare_it_goes_on_with_fewer_nodes(run: Run) -> None:
    words = ["torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"]
    backend = Script(run, [Status(False, {0: 1, 1: 1}), OK], words, hosts="ab")
    assert play(run, backend, [job(run, 2), job(run, 1)])[0] is None
    assert backend.used == [("a", "b"), ("a",)]


def test_lost_nodes_are_waited_for(run: Run) -> None:
    class Returning(Script):
        asked = 0

        def again(self, jobs: Sequence[Job], broken: Mapping[str, str]) -> Request:
            self.asked += 1
            if self.asked < 5:
                raise BackendError("node b is away")
            return super().again(jobs, broken)

    backend = Returning(run, [Status(True, {}, {1: "no answer over SSH for 8 s"}), OK])
    follow_grace = follow.FAILED_GRACE
    try:
        follow.FAILED_GRACE = 0.0
        verdict, said = play(run, backend)
    finally:
        follow.FAILED_GRACE = follow_grace
    assert verdict is None and backend.asked == 5
    assert "lost-node" in said[0] and sum("waiting for nodes" in text for text in said) == 1


def test_an_exit_that_nobody_explains_is_tried_again_only_if_ranks_had_begun(run: Run) -> None:
    backend = Script(run, [Status(False, {0: 1, 1: 1})])
    verdict, _ = play(run, backend)
    assert verdict and verdict.cause == "unknown" and len(backend.used) == 1
