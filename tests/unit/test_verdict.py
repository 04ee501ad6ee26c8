"""The verdict on a job: what a judge is told beside the logs, what he says of it, and what follows from it."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from trainfleet.backends.base import Phase, Status
from trainfleet.health import fence, heartbeat_format
from trainfleet.health.heartbeat_format import Beat
from trainfleet.health.watchdog import Alarm, Sentry
from trainfleet.node.supervisor import SEVERED, UNLOGGED
from trainfleet.plan.job import Artifact, Job, Request
from trainfleet.process.node_log import Log
from trainfleet.run import records
from trainfleet.run.run_folder import Run
from trainfleet.watch import lines
from trainfleet.watch.causes import CAUSES, Then
from trainfleet.watch.evidence import Book
from trainfleet.watch.lines import read_lines
from trainfleet.watch.monitor import AttemptOutcome
from trainfleet.watch.verdict import Verdict, judge, start_now
from verbs import ROOT

BAD = Status(Phase.ENDED, exits={0: 1, 1: 1})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    fence.begin(tmp_path)
    return Run(tmp_path)


def request(run: Run, hosts: str = "ab") -> Request:
    job = Job("train", "x", run.folder, len(hosts), 1, "m", (), True)
    return Request(
        job, tuple(Artifact(f"node-{node}.sh", "x") for node in range(len(hosts))), tuple(hosts)
    )


def write(run: Run, node: int, *said: str) -> None:
    """Lines of the node's one rank, of its agent where they begin with `agent: `, or of its kernel."""
    run.logs.mkdir(exist_ok=True)
    for text in said:
        who, _, words = (
            text.partition(": ")
            if text.startswith(("agent: ", "kernel: "))
            else (f"rank {node}", "", text)
        )
        Log(run.logs / f"node-{node}.log").note(who, words)


def verdict(
    run: Run,
    *,
    alarm: Alarm | None = None,
    status: Status = BAD,
    hosts: str = "ab",
    alive: tuple[int, ...] = (),
) -> Verdict:
    asked = request(run, hosts)
    return judge(
        asked,
        AttemptOutcome(status, alarm, frozenset(alive)),
        run,
        start_now(request(Run(run.folder / "none"))),
    )


TRACE = ("Traceback (most recent call last):", '  File "x.py", line 1, in f')


def test_the_watchdog_s_word_names_rank_and_node(run: Run) -> None:
    write(
        run,
        0,
        "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.4]:1",
    )
    found = verdict(
        run,
        alarm=Alarm(
            "silent rank 1: no heartbeat for 9 s, last seen in step 12; the others wait for it",
            1,
            1,
        ),
    )
    assert (found.cause, found.rank, found.node, found.host, found.sure) == (
        "hang",
        1,
        1,
        "b",
        True,
    )


def test_a_fault_counts_where_the_node_s_clock_is_behind_and_one_of_an_earlier_attempt_does_not(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = {
        "node": 1,
        "rank": 1,
        "error": "KeyError",
        "message": "'tokens'",
        "why": "",
        "next": "",
    }
    ranks, now = Run(run.folder, records.node(1, 1)), time.time()
    monkeypatch.setattr(time, "time", lambda: now - 300.0)
    ranks.record("fault", order=0, **fault | {"error": "ZeroDivisionError"})
    ranks.record("fault", order=1, **fault)
    monkeypatch.undo()
    write(run, 0, "RuntimeError: Connection reset by peer")
    found = verdict(run)
    assert (found.cause, found.rank, found.words) == ("code", 1, "KeyError: 'tokens'")


def test_what_all_ranks_raise_together_is_about_the_rank_that_it_names(run: Run) -> None:
    for rank in (0, 1):
        said = {
            "error": "CheckpointError",
            "message": "can't write a checkpoint on rank 1",
            "why": "Read-only file system (x)",
        }
        Run(run.folder, records.node(rank, 1)).record(
            "fault", order=1, node=rank, rank=rank, next="", **said
        )
    found = verdict(run)
    assert (found.cause, found.node, found.rank, found.host) == ("disk", 1, 1, "b")


def test_a_pid_in_the_kernel_s_words_leads_to_the_rank_that_had_it(run: Run) -> None:
    rows = [Beat(rank, 1, 700 + rank, 1, "step", 3, 0.1, time.time()) for rank in (4, 5, 6)]
    heartbeat_format.write_beats(run.folder, 1, 1, rows)
    write(
        run,
        1,
        "kernel: Memory cgroup out of memory: Killed process 705 (python) total-vm:1kB, anon-rss:1kB",
    )
    found = verdict(run)
    assert (found.cause, found.node, found.rank) == ("host-memory", 1, 5)


def test_of_two_runs_that_begin_on_a_host_at_once_the_other_is_named(run: Run) -> None:
    words = "b: /fsx/you:other (of ann) is running on this host, and fleet.exclusive is set; next: wait for it, use other hosts"
    found = verdict(run, status=Status(Phase.ENDED, words, exits={0: 143, 1: 75}))
    assert (
        found.cause == "busy"
        and "/fsx/you:other (of ann)" in found.words
        and found.then is Then.STOP
    )


def test_without_a_clue_the_last_words_of_every_rank_are_quoted(run: Run) -> None:
    write(run, 0, "loading", "the moon is full")
    write(run, 1, "what is that noise")
    found = verdict(run, status=Status(Phase.ENDED, exits={0: 0, 1: 3}))
    assert (found.cause, found.node, found.rank, found.sure) == ("unknown", 1, None, False)
    assert "without an error message" in found.words
    assert found.lines == (
        "rank 0 on node 0: the moon is full",
        "rank 1 on node 1: what is that noise",
    )


def test_an_exit_code_by_which_a_shell_says_that_it_found_no_command_is_a_cause(run: Run) -> None:
    write(run, 1, "sh: 1: /nowhere/python: is not there")
    found = verdict(run, status=Status(Phase.ENDED, exits={0: 0, 1: 127}))
    assert (found.cause, found.node, found.sure, found.then) == ("environment", 1, False, Then.STOP)
    assert found.words == "it ended with exit code 127: a command was not found"


def test_what_is_not_sure_says_so(run: Run) -> None:
    write(run, 0, *TRACE, "RuntimeError: the frobnicator")
    found = verdict(run)
    assert not found.sure and "most likely the program has a bug" in str(found)


def test_of_an_exception_that_nobody_knows_no_cause_is_named_but_whose_it_was_and_the_last_words_of_all(
    run: Run,
) -> None:
    write(run, 0, "step 3  loss 2.1  9 tokens/s")
    write(run, 1, *TRACE, "SomeLibraryError: the frobnicator")
    found = verdict(run)
    assert (found.cause, found.node, found.rank, found.sure) == ("unknown", 1, 1, False)
    assert str(found).startswith(
        "failed: rank 1 on node 1 (b): the logs show no known cause (unknown)\n  why: SomeLibraryError"
    )
    assert "rank 0 on node 0: step 3" in str(found) and found.next.endswith("node-1.log")


def test_a_node_that_was_killed_comes_before_an_exception_that_nobody_knows(run: Run) -> None:
    write(run, 1, *TRACE, "SomeLibraryError: the frobnicator")
    assert verdict(run, status=Status(Phase.ENDED, exits={0: 137, 1: 1})).cause == "killed"
    assert verdict(run, status=Status(Phase.ENDED, exits={0: 0, 1: 137})).cause == "unknown"


@pytest.mark.parametrize(
    "node_1, then",
    [("fine", Then.ELSEWHERE), ("ModuleNotFoundError: No module named 'torch'", Then.STOP)],
)
def test_a_node_without_the_environment_is_left_out_unless_all_lack_it(
    run: Run, node_1: str, then: Then
) -> None:
    write(run, 0, *TRACE, "ModuleNotFoundError: No module named 'torch'")
    write(run, 1, *(TRACE if "Error" in node_1 else ()), node_1)
    found = verdict(run)
    assert (found.cause, found.then) == ("environment", then)


def test_on_a_machine_that_plays_the_nodes_there_is_no_elsewhere(run: Run) -> None:
    write(run, 0, *TRACE, "ModuleNotFoundError: No module named 'torch'")
    job = Job("train", "x", run.folder, 1, 1, "m", (), True)
    asked = Request(job, (Artifact("node-0.sh", "x"),))
    assert (
        judge(
            asked, AttemptOutcome(BAD, None), run, start_now(request(Run(run.folder / "none")))
        ).then
        is Then.STOP
    )


def test_no_host_is_put_aside_on_a_suspicion() -> None:
    broken = Verdict("hardware", "w", 1, None, "b", (), "n")
    assert broken.then is Then.HERE


@pytest.mark.parametrize("words, then", [
    ("botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the GetObject operation", Then.HERE),
    ("botocore.exceptions.ClientError: An error occurred (503) when calling the HeadObject operation", Then.HERE),
    ("botocore.exceptions.ClientError: An error occurred (ExpiredToken) when calling the PutObject operation", Then.HERE),
    ("botocore.exceptions.ClientError: An error occurred (NoSuchBucket) when calling the PutObject operation", Then.STOP),
    ("botocore.exceptions.ClientError: An error occurred (RequestTimeTooSkewed) when calling the PutObject operation", Then.ELSEWHERE),
])  # fmt: skip
def test_each_cause_decides_what_follows(run: Run, words: str, then: Then) -> None:
    write(run, 1, *TRACE, words)
    assert verdict(run).then is then


def test_each_cause_says_what_to_type() -> None:
    for cause in CAUSES.values():
        assert cause.words and cause.next and "\n" not in cause.next


def test_the_pages_count_the_causes() -> None:
    named = len(CAUSES) - 1  # unknown is none
    for page in ("docs/explanation/verdicts.md", "CHANGELOG.md"):
        assert f" {named} causes" in (ROOT / page).read_text(), page


def test_of_a_log_without_end_the_first_and_the_last_lines_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "HEAD", 1000)
    monkeypatch.setattr(lines, "TAIL", 5000)
    log = tmp_path / "node-0.log"
    log.write_text("".join(f"rank 0  10:00:00.000 | line {number}\n" for number in range(10_000)))
    found = [line.text for line in read_lines(log, 0)]
    assert found[0] == "line 0" and found[-1] == "line 9999" and len(found) < 200
    assert all(text.startswith("line ") for text in found)


@pytest.mark.parametrize("exits", [{0: UNLOGGED, 1: UNLOGGED}, {0: 1, 1: UNLOGGED}])
def test_a_node_whose_log_is_closed_tells_by_its_exit_code_that_it_is_the_disk(
    run: Run, exits: dict[int, int]
) -> None:
    if exits[0] != UNLOGGED:
        write(
            run,
            0,
            "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.4]:1",
        )
    found = verdict(run, status=Status(Phase.ENDED, exits=exits))
    assert found.cause == "disk" and exits[found.node or 0] == UNLOGGED
    assert "its log can't be written" in found.words


@pytest.mark.parametrize(
    "exits, cause, then",
    [
        ({0: 1, 1: SEVERED}, "mount", Then.ELSEWHERE),
        ({0: SEVERED, 1: SEVERED}, "storage", Then.HERE),
    ],
)
def test_a_node_that_has_lost_the_file_server_is_left_out_and_if_all_have_the_server_is_meant(
    run: Run, exits: dict[int, int], cause: str, then: Then
) -> None:
    write(
        run,
        0,
        "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.4]:1",
    )
    found = verdict(run, status=Status(Phase.ENDED, exits=exits))
    assert (found.cause, found.node, found.then) == (
        cause,
        1 if cause == "mount" else None,
        then,
    ), found


def test_the_engine_s_own_reason_is_evidence(run: Run) -> None:
    write(
        run,
        0,
        "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.4]:1",
    )
    found = verdict(
        run, status=replace(BAD, reason="Host EC2 (instance i-0db7083f3fcbebb65) terminated.")
    )
    assert (found.cause, found.node, found.sure) == (
        "lost-node",
        None,
        False,
    )  # Batch says the same when Spot takes a host back


@pytest.mark.parametrize("alive, cause", [((0,), "lost-node"), ((0, 1), "slow")])
def test_a_node_that_still_beats_is_slow_and_not_lost(
    run: Run, alive: tuple[int, ...], cause: str
) -> None:
    write(
        run,
        0,
        "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.4]:1",
    )
    found = verdict(
        run, status=Status(Phase.RUNNING, lost={1: "no answer over SSH for 9 s"}), alive=alive
    )
    assert (found.cause, found.node) == (cause, 1)


def test_who_is_alive_is_told_by_beats_and_not_by_their_clocks(run: Run) -> None:
    sentry = Sentry(run.folder, 2, 1)
    for node in (0, 1):
        heartbeat_format.write_beats(
            run.folder, node, 1, [Beat(node, node, 1, 1, "step", 3, 0.1, 5.0)]
        )
    assert sentry.alive(5.0) == {0, 1}
    time.sleep(0.05)
    heartbeat_format.write_beats(run.folder, 0, 1, [Beat(0, 0, 1, 1, "step", 4, 0.1, 6.0)])
    assert sentry.alive(0.04) == {0}


CUT = "ended within 0 s without a checkpoint: the scheduler kills a job before the grace time ends"


def test_an_engine_that_kills_before_the_grace_time_is_named(run: Run) -> None:
    write(run, 0, "step 3  loss 2.1  9 tokens/s")
    Log(run.logs / "node-0.log").note("node", "asked to stop (SIGTERM) with 20 s to save and exit")
    found = verdict(run, status=Status(Phase.ENDED, exits={0: 137, 1: 0}))
    assert (
        found.cause == "killed"
        and CUT in found.words
        and "ECS_CONTAINER_STOP_TIMEOUT" in found.words
    )
    run.note("stopped", step=3)
    assert CUT not in verdict(run, status=Status(Phase.ENDED, exits={0: 137, 1: 0})).words, (
        "all was saved before"
    )


def test_what_somebody_has_ended_is_not_begun_again(run: Run) -> None:
    write(run, 0, "step 3  loss 2.1  9 tokens/s")
    found = verdict(
        run, status=Status(Phase.ENDED, "ended on request: by hand", exits={0: 137, 1: 137})
    )
    assert (found.cause, found.then) == (
        "cancelled",
        Then.STOP,
    ) and "ended on request: by hand" in found.words


def test_who_did_not_leave_in_time_is_told_from_that(run: Run) -> None:
    write(run, 0, "step 3  loss 2.1  9 tokens/s")
    for words in (
        "asked to stop (SIGTERM) with 20 s to save and exit",
        "killed, because it did not stop within 20 s",
    ):
        Log(run.logs / "node-0.log").note("node", words)
    found = verdict(
        run, status=Status(Phase.ENDED, "Job attempt duration exceeded timeout", exits={0: 137})
    )
    assert (
        found.cause == "preempted"
        and "node 0 did not finish saving before its deadline" in found.words
    )


def test_a_node_that_is_ended_as_another_has_failed_was_no_cause(run: Run) -> None:
    write(
        run,
        1,
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in <module>',
        "TypeError: unsupported operand",
    )
    Log(run.logs / "node-0.log").note("node", "asked to stop (SIGTERM) with 20 s to save and exit")
    assert "grace" not in verdict(run, status=Status(Phase.ENDED, exits={0: 137, 1: 1})).words


def test_where_a_node_left_no_log_what_the_engine_kept_is_read(run: Run) -> None:
    run.logs.mkdir()
    (run.logs / "engine-1.log").write_text(
        "scheduler  07:01:02.345 | exec /usr/bin/python3: exec format error\n"
    )
    found = verdict(run, status=Status(Phase.ENDED, exits={1: 1}))
    assert "exec format error" in str(found), str(found)
    (run.logs / "engine-1.log").touch()
    os.utime(run.logs / "engine-1.log", (1, 1))
    assert "exec format error" not in str(verdict(run, status=Status(Phase.ENDED, exits={1: 1}))), (
        "it is an earlier attempt's"
    )


def test_a_name_that_every_node_has_blames_none() -> None:
    """Ranks of one machine say of their own loopback that it is theirs, and of the store's that it broke."""
    book = Book()
    book.note(
        1,
        2,
        "recvValue failed on SocketImpl(fd=7, addr=[localhost]:4, remote=[localhost]:5): Connection reset by peer",
    )
    book.note(
        1,
        2,
        "recvValue failed on SocketImpl(fd=7, addr=[10.0.0.2]:4, remote=[10.0.0.1]:5): Connection reset by peer",
    )
    assert [book.node_of(name) for name in ("localhost", "127.0.0.1", "10.0.0.2")] == [
        None,
        None,
        1,
    ]
