"""The watchdog's judgement, on heartbeats of a fake clock; and the heartbeats themselves, with a real thread and real files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainfleet.health import heartbeat
from trainfleet.health.heartbeat import Heart, innermost, odd_one
from trainfleet.health.heartbeat_format import Beat, read_beats
from trainfleet.health.watchdog import SLOW_LOOKS, Alarm, Limits, Sentry, Watchdog


class Fleet:
    """Ranks that beat once a second and make a step every `pace` seconds, until told otherwise."""

    def __init__(self, ranks: int, pace: float = 0.5) -> None:
        self.dog = Watchdog(ranks, began=0.0)
        self.pace, self.now = pace, 0.0
        self.places = dict.fromkeys(range(ranks), ("step", 1.0, 0.0))  # phase, step, since
        self.beats: dict[int, Beat] = {}
        self.stopped: set[int] = set()  # ranks that no longer beat
        self.moving = True
        self.busy, self.log_every = (
            dict.fromkeys(range(ranks), 0.1),
            2,
        )  # steps between two readings of it

    def run(self, seconds: int) -> Alarm | None:
        """The first alarm within so many seconds."""
        for _ in range(seconds):
            self.now += 1
            for rank, (phase, step, since) in self.places.items():
                if self.moving and phase == "step":
                    steps = int((self.now - since) / self.pace)
                    step, since = step + steps, since + steps * self.pace
                self.places[rank] = phase, step, since
                if rank not in self.stopped:
                    self.beats[rank] = Beat(rank, rank // 2, 1, 0, phase, int(step), self.now - since, self.now, self.pace,
                                            self.busy[rank] + step // self.log_every * 1e-9)  # fmt: skip
            if alarm := self.dog.look(self.beats, self.now):
                return alarm
        return None

    def all_in(self, phase: str) -> None:
        self.places = {rank: (phase, step, self.now) for rank, (_, step, _) in self.places.items()}


def test_a_job_that_gets_on_raises_no_alarm() -> None:
    fleet = Fleet(4)
    assert fleet.run(600) is None
    assert fleet.dog.usual_step == pytest.approx(0.5)


def test_a_stopped_rank_is_named_within_ten_seconds() -> None:
    fleet = Fleet(4)
    fleet.run(30)
    fleet.stopped, fleet.moving = {3}, False
    began = fleet.now
    alarm = fleet.run(60)
    assert alarm and (alarm.rank, alarm.node) == (3, 1)
    assert fleet.now - began <= 10
    assert "silent rank 3" in alarm.words


def test_a_stale_file_is_no_alarm_while_the_ranks_get_on() -> None:
    fleet = Fleet(4)
    fleet.run(30)
    fleet.stopped = {2}
    assert fleet.run(300) is None


def test_what_ranks_ran_in_must_end_soon_after_all_of_them() -> None:
    fleet = Fleet(4)
    fleet.run(30)
    fleet.all_in("end")
    fleet.run(1)
    fleet.stopped = {0, 1, 2, 3}  # as their hearts end with them
    assert fleet.run(29) is None
    alarm = fleet.run(5)
    assert alarm and "all ranks ended" in alarm.words and alarm.rank is None


def test_long_steps_have_long_limits() -> None:
    fleet = Fleet(2, pace=20)
    fleet.run(200)
    fleet.stopped, fleet.moving = {1}, False
    assert fleet.run(55) is None, "three usual steps are a minute"
    assert fleet.run(30) == Alarm(fleet.dog.look(fleet.beats, fleet.now).words, 1, 0)  # type: ignore[union-attr]


def test_all_files_stale_at_once_are_the_file_systems_fault_for_two_minutes() -> None:
    fleet = Fleet(4)
    fleet.run(30)
    fleet.stopped = {0, 1, 2, 3}
    assert fleet.run(110) is None
    assert fleet.run(20) is not None


def test_ranks_that_are_alive_and_stuck_in_a_step() -> None:
    fleet = Fleet(4, pace=2)
    fleet.run(60)
    fleet.moving = False
    assert fleet.run(18) is None
    alarm = fleet.run(10)
    assert alarm and alarm.rank is None and "no rank made progress" in alarm.words


def test_of_stuck_ranks_the_one_behind_is_named() -> None:
    fleet = Fleet(4)
    fleet.run(30)
    fleet.moving = False
    phase, step, since = fleet.places[2]
    fleet.run(1)
    fleet.places = {rank: (phase, step + (rank != 2), since) for rank in fleet.places}
    alarm = fleet.run(30)
    assert alarm and (alarm.rank, alarm.node) == (2, 1)


@pytest.mark.parametrize(
    "phase", ["start", "load", "compile", "checkpoint", "validate", "conclude"]
)
def test_other_phases_may_take_long_and_not_for_ever(phase: str) -> None:
    fleet = Fleet(2)
    fleet.run(30)
    fleet.all_in(phase)
    limit = int(Limits().of(phase, 0.5))
    assert fleet.run(limit - 5) is None
    alarm = fleet.run(10)
    assert alarm and phase in alarm.words


def test_rank_0_may_conclude_for_long_after_the_others_have_ended_and_not_for_ever() -> None:
    fleet = Fleet(2)
    fleet.run(30)
    fleet.all_in("conclude")
    fleet.run(1)
    fleet.places[1] = ("end", *fleet.places[1][1:])
    fleet.run(1)
    fleet.stopped.add(1)
    limit = int(Limits().conclude)
    assert fleet.run(limit - 5) is None
    alarm = fleet.run(10)
    assert alarm and "in conclude" in alarm.words


def test_a_rank_that_never_came_is_named() -> None:
    fleet = Fleet(3)
    fleet.stopped = {1}
    assert fleet.run(590) is None
    alarm = fleet.run(20)
    assert alarm and alarm.rank == 1 and "sent no heartbeat" in alarm.words


def test_a_slow_rank_is_named_once_and_not_for_one_slow_step() -> None:
    fleet = Fleet(4)
    fleet.run(20)
    fleet.busy[2] = 0.4
    fleet.run(2)
    fleet.busy[2] = 0.1
    fleet.run(20)
    assert not fleet.dog.slow()
    fleet.busy[2] = 0.4
    named = []
    for _ in range(3 * SLOW_LOOKS):
        fleet.run(1)
        named += [beat.rank for beat in fleet.dog.slow()]
    assert named == [2]


def test_a_rank_is_slow_by_several_readings_however_many_beats_repeat_one() -> None:
    """`busy` is read when a step is logged: here every hundred seconds."""
    fleet, named = Fleet(4), []
    fleet.log_every = 200
    fleet.run(110)
    fleet.busy[2] = 0.4
    for second in range(400):
        fleet.run(1)
        named += [(beat.rank, second) for beat in fleet.dog.slow()]
    assert [rank for rank, _ in named] == [2] and 180 < named[0][1] < 300


def test_clocks_of_nodes_do_not_matter() -> None:
    fleet = Fleet(4)
    for _ in range(40):
        fleet.run(1)
        skewed = {
            rank: beat._replace(time=beat.time + 5000 * rank) for rank, beat in fleet.beats.items()
        }
        assert fleet.dog.look(skewed, fleet.now) is None


STACK = """Thread 0x00007f2c (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 359 in wait

Current thread 0x00007f2d (most recent call first):
  File "/code/trainfleet/health/heartbeat.py", line 150 in dump_stacks

Thread 0x00007f2e (most recent call first):
  File "{}", line {} in {}
  File "/code/trainfleet/engine/trainer.py", line 44 in fit
"""
WAITS = STACK.format("/venv/torch/autograd/graph.py", 869, "_engine_run_backward")
READS = STACK.format("/code/trainfleet/data/dataset.py", 51, "batch")


def test_stacks_name_the_odd_one() -> None:
    assert innermost(READS) == "dataset.py:51 batch"
    assert odd_one({0: WAITS, 1: WAITS, 2: READS, 3: WAITS}) == (2, "dataset.py:51 batch")
    assert odd_one({0: WAITS, 1: WAITS, 2: WAITS}) is None
    assert odd_one({0: WAITS, 1: READS}) is None, "of two, either may be odd"


def test_a_heart_beats_says_where_it_is_and_shows_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "EVERY", 0.02)
    heart = Heart(tmp_path, rank=3, node=1, order=2)
    heart.at("step", 17)
    time.sleep(0.15)
    beat = read_beats(tmp_path, attempt=2)[3]
    assert (beat.node, beat.pid, beat.phase, beat.step) == (1, os.getpid(), "step", 17)
    assert 0.05 < beat.phase_seconds < 5
    assert not read_beats(tmp_path, attempt=1), "what another attempt left is not this one's"
    asked = time.time() - 1
    heartbeat.ask(tmp_path)
    deadline = time.monotonic() + 10
    while not heartbeat.Stacks(tmp_path, asked).read() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "test_a_heart_beats" in heartbeat.Stacks(tmp_path, asked).read()[3]
    heart.stop()
    assert read_beats(tmp_path, attempt=2)[3].phase == "end"


def test_beats_come_from_a_process_whose_main_thread_waits_in_c_and_stop_when_it_is_stopped(
    tmp_path: Path,
) -> None:
    code = "import sys, time; from pathlib import Path; from trainfleet.health.heartbeat import Heart\n"
    code += "heart = Heart(Path(sys.argv[1]), 0, 0, 0); heart.at('step', 5); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"PYTHONPATH": "python"}
    )
    try:
        deadline = time.monotonic() + 10
        while not read_beats(tmp_path, 0) and time.monotonic() < deadline:
            time.sleep(0.05)
        first = read_beats(tmp_path, 0)[0]
        time.sleep(1.3)
        assert read_beats(tmp_path, 0)[0].time > first.time
        os.kill(process.pid, 19)  # SIGSTOP
        time.sleep(0.2)
        stopped = read_beats(tmp_path, 0)[0]
        time.sleep(1.3)
        assert read_beats(tmp_path, 0)[0].time == stopped.time
    finally:
        process.kill()
        process.wait()


def test_a_beat_costs_the_training_loop_next_to_nothing(tmp_path: Path) -> None:
    heart = Heart(tmp_path, 0, 0, 0)
    began = time.perf_counter()
    for step in range(100_000):
        heart.at("step", step)
    assert time.perf_counter() - began < 0.5, "a loop of 5 µs a step would be a fault"
    heart.stop()


def test_the_sentry_reads_what_ranks_leave_and_asks_them_for_their_stacks(tmp_path: Path) -> None:
    sentry = Sentry(tmp_path, ranks=1, attempt=0, limits=Limits(step=0.2, steps=1, compile=0.2))
    heart = Heart(tmp_path, 0, 0, 0)
    heart.at("step", 1)
    deadline = time.monotonic() + 20
    alarm = None
    while alarm is None and time.monotonic() < deadline:
        time.sleep(0.1)
        alarm = sentry.look()
    heart.stop()
    assert alarm and "no rank made progress" in alarm.words
    assert (tmp_path / "logs" / "stacks-rank-0.txt").exists()
