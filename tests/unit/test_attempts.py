"""How often, how long apart and on which nodes a failed job is tried again; the backend's attempts end as they are told to."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from trainfleet.backends.base import Handle, Phase, Status
from trainfleet.backends.run_storage import Here
from trainfleet.config import Settings, load
from trainfleet.health import fence, heartbeat_format
from trainfleet.node.placement import Terms
from trainfleet.plan.job import Artifact, Job, Request
from trainfleet.process.processes import Interrupts
from trainfleet.recipes import FOLDER
from trainfleet.run import run_folder
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import BackendError, RunError
from trainfleet.watch import monitor, retry_loop
from trainfleet.watch.budget import Budget
from trainfleet.watch.monitor import MonitoredAttempt, Watch
from trainfleet.watch.retry_loop import Attempts
from trainfleet.watch.verdict import Verdict


class Script:
    """A backend on hosts a, b, c ...; attempt n ends with the n-th of `ends`, and the n-th of `words` in node 1's log."""

    def __init__(
        self, run: Run, ends: Sequence[Status], words: Sequence[str] = (), hosts: str = "abc"
    ) -> None:
        self.run, self.ends, self.words, self.hosts = run, list(ends), list(words), hosts
        self.used: list[tuple[str, ...]] = []
        self.attempts: list[str] = []
        self.tokens: list[str] = []
        self.unreached = ""  # the name of this machine, once it reaches no other
        self.saves: set[int] = set()  # attempts that commit a checkpoint
        self.terms = Terms(wait=0)
        self.stops: list[bool] = []  # whether ranks find a stop request as an attempt begins

    def plan(self, job: Job, without: Mapping[str, str]) -> Request:
        sound = [host for host in self.hosts if host not in without]
        if job.nodes > len(sound):
            raise BackendError("too few nodes")
        return Request(
            job,
            tuple(Artifact(f"node-{node}.sh", "exec x") for node in range(job.nodes)),
            tuple(sound[: job.nodes]),
        )

    def submit(self, request: Request) -> Handle:
        number = len(self.used)
        self.used.append(request.hosts)
        self.stops.append(self.run.stop.exists())
        self.attempts.append(request.environment["TRAINFLEET_ATTEMPT"])
        self.tokens.append(request.token)
        if number in self.saves:
            self.run.record("checkpointed", step=number)
        if number < len(self.words):
            log = request.logs[1]
            log.parent.mkdir(exist_ok=True)
            with open(log, "a") as file:
                file.write(f"rank 1  10:00:00.000 | {self.words[number]}\n")
        return Handle("script", str(number), request.token, request.job.nodes, request.hosts)

    def status(self, handle: Handle) -> Status:
        return self.ends[min(int(handle.id), len(self.ends) - 1)]

    def stop(self, handle: Handle, at_once: bool) -> None: ...

    def absent(self, hosts: Sequence[str]) -> Mapping[int, str]:
        return {}

    def cut_off(self, handle: Handle) -> str:
        return self.unreached


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(retry_loop, "BACK_OFF", (0.0,))
    monkeypatch.setattr(retry_loop, "ASK_AGAIN", 0.01)
    monkeypatch.setattr(monitor, "POLL", 0.0)
    monkeypatch.setattr(monitor, "SILENT_GRACE", 0.5)
    return Run(tmp_path)


def job(run: Run, nodes: int = 2) -> Job:
    return Job("train", "x", run.folder, nodes, 1, "m", (), True)


def play(run: Run, backend: Script, jobs: Sequence[Job] = ()) -> tuple[Verdict | None, list[str]]:
    said: list[str] = []
    jobs = jobs or [job(run)]
    watch, request = watch_of(run, backend, said), backend.plan(jobs[0], {})
    return Attempts(watch, request, jobs, lambda job: None).persevere().verdict, said


def watch_of(run: Run, backend: Script, said: list[str] | None = None) -> Watch:
    config, _ = load(Settings(FOLDER / "first-run.yaml"))
    say = [] if said is None else said
    return Watch(
        backend,
        Here(run),
        run,
        Interrupts(),
        lambda waits: None,
        say.append,
        Budget(run, config, None),
    )  # type: ignore[arg-type]


ENDED = Phase.ENDED
OK = Status(ENDED, exits={0: 0, 1: 0})
BAD = Status(ENDED, exits={0: 1, 1: 137})
FAILED = Status(ENDED, exits={0: 1, 1: 1})


def test_ranks_that_were_cut_off_have_not_ended_well_whatever_the_engine_says(run: Run) -> None:
    told = replace(OK, reason="ended on request: StopTrainingJob", ended_by="StopTrainingJob")
    verdict, _ = play(run, Script(run, [told]))
    assert verdict is not None and verdict.cause == "cancelled"
    run.note("finished", step=3)
    assert play(run, Script(run, [told]))[0] is None


def test_a_job_that_ends_well_is_run_once(run: Run) -> None:
    backend = Script(run, [OK])
    assert play(run, backend)[0] is None and len(backend.used) == 1


def test_a_killed_node_is_tried_again_with_a_number_of_its_own(run: Run) -> None:
    backend = Script(run, [BAD, OK])
    verdict, said = play(run, backend)
    assert verdict is None and backend.attempts == ["1", "2"] and "killed" in said[0]
    assert len(set(backend.tokens)) == 2, "each attempt is submitted for itself"
    assert run.read_results()["restarts"] == 1
    assert [event["event"] for event in run.read_events()] == ["verdict", "restarted"]
    backend = Script(run, [OK])
    play(run, backend)
    assert backend.attempts == ["3"], (
        "also across launches: a rank of an older one must see that its time is over"
    )


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
    backend = Script(run, [FAILED], [words])
    verdict, _ = play(run, backend)
    assert (
        verdict
        and (verdict.cause, verdict.rank, verdict.node) == (cause, 1, 1)
        and len(backend.used) == 1
    )


def test_a_broken_device_is_left_out_for_a_spare(run: Run) -> None:
    backend = Script(
        run,
        [FAILED, OK],
        ["torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"],
    )
    assert play(run, backend)[0] is None
    assert backend.used == [("a", "b"), ("a", "c")]


def test_without_a_spare_it_goes_on_with_fewer_nodes(run: Run) -> None:
    words = ["torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"]
    backend = Script(run, [FAILED, OK], words, hosts="ab")
    assert play(run, backend, [job(run, 2), job(run, 1)])[0] is None
    assert backend.used == [("a", "b"), ("a",)]


def test_lost_nodes_are_waited_for(run: Run) -> None:
    class Returning(Script):
        asked = 0

        def plan(self, job: Job, without: Mapping[str, str]) -> Request:
            self.asked += bool(self.used) and "b" not in without
            if self.used and self.asked < 5:
                raise BackendError("node b is away")
            return super().plan(job, without)

    backend = Returning(run, [Status(Phase.RUNNING, lost={1: "no answer over SSH for 8 s"}), OK])
    follow_grace = monitor.FAILED_GRACE
    try:
        monitor.FAILED_GRACE = 0.0
        verdict, said = play(run, backend)
    finally:
        monitor.FAILED_GRACE = follow_grace
    assert verdict is None and backend.asked == 5
    assert "lost-node" in said[0] and sum("waiting for nodes" in text for text in said) == 1


def test_an_exit_that_nobody_explains_is_tried_again_only_if_ranks_had_begun(run: Run) -> None:
    backend = Script(run, [FAILED])
    verdict, _ = play(run, backend)
    assert verdict and verdict.cause == "unknown" and len(backend.used) == 1


def test_a_verdict_is_told_also_where_there_is_no_room_to_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RunError("can't write", why="No space left on device")

    monkeypatch.setattr(run_folder, "append_line", full)
    monkeypatch.setattr(run_folder, "write_atomic", full)
    told = retry_loop.conclude(
        Run(tmp_path), Verdict("disk", "w", 0, None, "a", (), "df -h"), "stopped all nodes"
    )
    assert told.done == "stopped all nodes" and "(disk)" in str(told)


def test_while_the_run_folder_is_not_seen_nothing_is_held_against_the_ranks(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of a run in S3 fails for a while: the job goes on, is not watched meanwhile, and then is again."""
    looks, looked = list[str](), list[str]()

    class Away(Here):
        pace = 0.0

        def refresh(self) -> None:
            looks.append("look")
            if 3 <= len(looks) <= 6:
                raise BackendError("S3 sent no valid response")

    class Sentry:
        def __init__(self, *_: object) -> None:
            looked.append(f"anew at {len(looks)}")

        def look(self) -> None:
            looked.append(f"look {len(looks)}")

        def newly_slow(self) -> list[object]:
            return []

        slower = False

        def slow_links(self) -> dict[int | None, str]:
            return {}

    backend = Script(run, [])
    monkeypatch.setattr(
        backend, "status", lambda handle: Status(Phase.RUNNING) if len(looks) < 9 else OK
    )
    monkeypatch.setattr(monitor, "Sentry", Sentry)
    said: list[str] = []
    config, _ = load(Settings(FOLDER / "first-run.yaml"))
    watch = Watch(
        backend,
        Away(run),
        run,
        Interrupts(),
        lambda waits: None,
        said.append,
        Budget(run, config, None),
    )  # type: ignore[arg-type]
    assert (
        Attempts(watch, backend.plan(job(run), {}), [job(run)], lambda job: None)
        .persevere()
        .verdict
        is None
    )
    assert said == ["the run folder can't be updated: S3 sent no valid response"]
    assert looked == ["anew at 2", "look 2", "anew at 7", "look 7", "look 8", "look 9"]


class Beating:
    """A sentry that hears these nodes, and nothing else."""

    def __init__(self, *nodes: int) -> None:
        self.nodes = frozenset(nodes)

    def alive(self, within: float) -> frozenset[int]:
        return self.nodes


def attempt_of(
    run: Run, job: Job, *alive: int, progress: Callable[[], object] = lambda: None
) -> MonitoredAttempt:
    backend = Script(run, [OK])
    attempt = MonitoredAttempt(
        replace(watch_of(run, backend), progress=progress), backend.plan(job, {})
    )
    attempt.sentry = Beating(*alive)  # type: ignore[assignment]
    return attempt


@pytest.mark.parametrize("status, alive, broken", [
    (Status(Phase.RUNNING, lost={1: "silence"}, silent=frozenset({1})), (1,), False),
    (Status(Phase.RUNNING, lost={1: "silence"}, silent=frozenset({1})), (), True),
    (Status(Phase.RUNNING, lost={1: "it rebooted"}), (1,), True),
    (Status(Phase.RUNNING, lost={0: "silence", 1: "silence"}, silent=frozenset({0, 1})), (1,), True),
    (Status(Phase.RUNNING, exits={0: 1}, lost={1: "silence"}, silent=frozenset({1})), (1,), True),
])  # fmt: skip
def test_only_what_is_silent_on_every_channel_is_lost(
    run: Run, status: Status, alive: tuple[int, ...], broken: bool
) -> None:
    attempt = attempt_of(run, job(run), *alive)
    assert attempt._is_broken(status) is broken and attempt._is_broken(status) is broken
    told = [event["node"] for event in run.read_events() if event["event"] == "unreachable"]
    assert told == list(status.silent & set(alive)), "each node once"


def test_a_job_whose_ranks_have_finished_is_not_tried_again(run: Run) -> None:
    run.record("launched", nodes=2, ranks_per_node=1)
    run.record("finished", step=5)
    backend = Script(run, [Status(ENDED, exits={0: 0}, lost={1: "silence"}, silent=frozenset({1}))])
    verdict, said = play(run, backend)
    assert verdict is None and len(backend.used) == 1 and "the ranks have finished" in said[0]
    assert "no answer from" in said[1] and "run make clean to end the processes there" in said[2], (
        "it was waited for"
    )


def test_all_lost_nodes_are_named(run: Run) -> None:
    lost = Status(ENDED, exits={0: 137}, lost={1: "no answer over SSH", 2: "it rebooted"})
    backend = Script(run, [lost, OK], hosts="abcdef")
    play(run, backend, [job(run, 3)])
    events = {event["event"]: event for event in run.read_events()}
    assert (
        "lost node 1" in events["verdict"]["words"]
        and "lost node 2 (c): it rebooted" in events["verdict"]["words"]
    )
    assert events["restarted"]["who"] == "node 1 (b) and c" and backend.used[1] == ("a", "d", "e")


def test_a_job_without_beats_that_gets_no_further_ends(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a tokenizer that is stopped: nobody but the launcher can tell."""
    clock, done = [0.0], [0]
    monkeypatch.setattr(monitor.time, "monotonic", lambda: clock[0])
    attempt = attempt_of(run, replace(job(run), torchrun=False), progress=lambda: done[0])
    attempt.sentry, running = None, Status(Phase.RUNNING)
    for _ in range(10):
        clock[0] += 1000.0
        done[0] += 1
        assert attempt._still(running) is None
    clock[0] += 1700.0
    assert attempt._still(running) is None
    clock[0] += 200.0
    assert attempt._still(Status(Phase.QUEUED)) is None, "in a queue nothing is expected of it"
    clock[0] += 1900.0
    alarm = attempt._still(running)
    assert alarm and alarm.words.startswith("no rank made progress for 1900 s")


LOST = Status(Phase.RUNNING, exits={0: 1}, lost={1: "no answer over SSH"}, silent=frozenset({1}))


def test_a_launcher_that_reaches_nobody_blames_itself_and_leaves_the_run_to_the_host_that_stands_by(
    run: Run,
) -> None:
    backend = Script(run, [LOST])
    backend.unreached = "a"
    watch = replace(watch_of(run, backend), standby=lambda: "b")
    with pytest.raises(
        monitor.CutOff, match=r"can't reach any other host over SSH, .* heartbeats from b"
    ):
        Attempts(watch, backend.plan(job(run), {}), [job(run)], lambda job: None).persevere()
    verdict = next(event for event in run.read_events() if event["event"] == "verdict")
    assert (verdict["cause"], verdict["host"], verdict["node"]) == ("lost-node", "a", 0)
    assert verdict["done"] == "left the run to the standby b" and len(backend.used) == 1


def test_a_launcher_that_reaches_nobody_and_sees_nobody_alive_goes_by_what_it_knows(
    run: Run,
) -> None:
    """Of two hosts the other one has lost its power: its ranks beat no more, and nothing stands by."""
    backend = Script(run, [LOST, OK])
    backend.unreached = "a"
    assert play(run, backend)[0] is None
    assert next(event for event in run.read_events() if event["event"] == "verdict")[
        "host"
    ] == "b" and backend.used == [
        ("a", "b"),
        ("a", "c"),
    ]


def test_a_launcher_that_was_taken_for_dead_begins_and_ends_nothing(run: Run) -> None:
    class Over(Exception):
        pass

    def leave() -> None:
        raise Over

    backend = Script(run, [OK])
    request = backend.plan(job(run), {})
    watch = replace(watch_of(run, backend), confirm=leave)
    with pytest.raises(Over):
        Attempts(watch, request, [job(run)], lambda job: None).persevere()
    assert fence.current(run.folder).number == 0 and not backend.used


def test_what_an_ended_attempt_s_node_asked_for_does_not_stop_the_next(run: Run) -> None:
    run.ask_to_stop("signal 15")
    backend = Script(run, [BAD, OK])
    assert play(run, backend)[0] is None and backend.stops == [False, False]
    run.ask_to_stop()
    play(run, last := Script(run, [OK]))
    assert last.stops == [True], "a user's request stays"


def test_restarts_are_counted_over_launchers(run: Run) -> None:
    run.update_results(restarts=3)
    play(run, Script(run, [BAD, OK]))
    assert run.read_results()["restarts"] == 4


def test_a_file_system_that_fails_for_a_moment_ends_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[object]()

    def scandir(folder: object) -> object:
        looks.append(folder)
        raise OSError(errno.EIO, "Input/output error")

    (run.folder / heartbeat_format.FOLDER).mkdir(parents=True)
    monkeypatch.setattr(heartbeat_format.os, "scandir", scandir)
    assert heartbeat_format.Beats(run.folder, 1).new() == {} and looks


def test_the_watchdog_waits_longer_for_a_node_than_the_nodes_do(run: Run) -> None:
    backend = Script(run, [OK])
    backend.terms = Terms(wait=900)
    watched = MonitoredAttempt(watch_of(run, backend), backend.plan(job(run), {}))
    watched._notice(Status(Phase.RUNNING, attempt=1))
    assert watched.sentry and watched.sentry.limits.start > 900
