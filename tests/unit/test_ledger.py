"""The ledger: every second of a run is counted once, whatever happened to it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from trainfleet.report.history import read
from trainfleet.run.run_folder import Run
from trainfleet.watch.time_accounting import goodput, ledger

Record = dict[str, Any]


def event(time: float, name: str, **fields: Any) -> Record:
    return {"time": time, "event": name, **fields}


def line(step: int, time: float, span: float, **apart: float) -> Record:
    return {
        "step": step,
        "time": time,
        "span": span,
        **{f"in_{name}": value for name, value in apart.items()},
    }


def test_a_run_without_trouble() -> None:
    events = [
        event(110, "launched", started=100),
        event(130, "began", step=0),
        event(170, "finished", step=4),
    ]
    metrics = [
        line(1, 142, 12, compile=11),
        line(2, 143, 1),
        line(3, 150, 7, checkpoint=2, validate=4),
        line(4, 151, 1),
    ]
    spent = ledger(events, metrics)
    assert spent == {
        "useful": 5.0,
        "validate": 4.0,
        "checkpoint": 2.0 + 19.0,
        "compile": 10.0,
        "prepare": 10.0,
        "start": 20.0,
    }
    assert sum(spent.values()) == 70 and goodput(spent) == round(5 / 70, 4)


def test_a_first_step_s_compiling_is_told_from_its_work_where_lines_are_of_many_steps() -> None:
    events = [
        event(100, "launched", started=100),
        event(100, "began", step=0),
        event(132, "finished", step=20),
    ]
    spent = ledger(
        events,
        [line(10, 112, 12, compile=3) | {"seconds": 1.2}, line(20, 132, 20) | {"seconds": 1.0}],
    )
    assert spent == {"useful": 30.0, "compile": 2.0}


def test_steps_that_a_crash_lost_are_repeated_ones_and_what_follows_is_down() -> None:
    lost = [line(2, 104, 2), line(3, 106, 2, checkpoint=1)]
    events = [event(100, "launched", started=100), event(101, "began", step=0), event(116, "verdict"), event(120, "restarted"),
              event(124, "lost", step=1, steps=2, spans=lost), event(125, "began", step=1), event(130, "finished", step=3)]  # fmt: skip
    spent = ledger(events, [line(1, 102, 1), line(2, 127, 2), line(3, 129, 2)])
    assert spent == {"useful": 5.0, "repeated": 3.0, "checkpoint": 2.0, "start": 6.0, "down": 14.0}
    assert sum(spent.values()) == 30


def test_an_engine_s_queue_is_told_from_the_start_behind_it() -> None:
    events = [
        event(0, "launched", started=0),
        event(1, "queued"),
        event(61, "running"),
        event(71, "began", step=0),
        event(75, "stopped", step=1),
    ]
    assert ledger(events, [line(1, 74, 3)]) == {
        "useful": 3.0,
        "checkpoint": 1.0,
        "queue": 60.0,
        "start": 11.0,
    }


def test_the_time_between_two_commands_is_nobody_s() -> None:
    one = [event(0, "launched", started=0), event(2, "began", step=0), event(5, "stopped", step=1)]
    two = [
        event(1005, "launched", started=1000),
        event(1006, "began", step=1),
        event(1010, "finished", step=2),
    ]
    spent = ledger([*one, *two], [line(1, 4, 2), line(2, 1009, 3)])
    assert sum(spent.values()) == 5 + 10 and spent["useful"] == 5


def test_a_run_that_goes_on_is_counted_up_to_now() -> None:
    events = [event(0, "launched", started=0), event(2, "began", step=0)]
    assert ledger(events, [line(1, 4, 2)], now=9.0) == {"useful": 7.0, "start": 2.0}
    assert ledger([*events, event(6, "verdict")], [line(1, 4, 2)], now=9.0) == {
        "useful": 2.0,
        "start": 2.0,
        "down": 5.0,
    }


def test_an_older_run_tells_nothing_and_its_stages_stay() -> None:
    assert ledger([], [{"step": 1, "seconds": 1.0}]) == {} and goodput({}) is None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_and_however_clocks_differ_it_adds_up(seed: int) -> None:
    dice = random.Random(seed)
    now, skew, events, metrics, step = 1000.0, dice.uniform(-5, 5), [], [], 0
    whole = 0.0
    for _ in range(dice.randint(1, 3)):
        begin = now
        now += dice.uniform(0, 9)
        events.append(event(now, "launched", started=begin))
        for attempt in range(dice.randint(1, 4)):
            now += dice.uniform(1, 20)
            if attempt and dice.random() < 0.5:
                events.append(
                    event(
                        now + skew,
                        "lost",
                        step=step,
                        steps=3,
                        spans=[line(step, now - 9, 2.0, checkpoint=1.0)],
                    )
                )
            events.append(event(now + skew, "began", step=step))
            for _ in range(dice.randint(0, 9)):
                took, step = dice.uniform(0.1, 4), step + 1
                now += took
                metrics.append(
                    line(
                        step,
                        now + skew,
                        took,
                        checkpoint=dice.uniform(0, 1),
                        validate=dice.uniform(0, 9),
                    )
                )
            now += dice.uniform(0, 30)
            events.append(event(now, "verdict"))
            now += dice.uniform(0, 5)
            events.append(event(now, "restarted"))
        now += 10
        events.append(event(now, "stopped", step=step))
        whole += now - begin
        now += dice.uniform(0, 10_000)
    spent = ledger(events, metrics)
    assert sum(spent.values()) == pytest.approx(whole, abs=0.1) and min(spent.values()) >= 0


def test_status_and_report_show_what_the_ledger_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.record("launched", nodes=1, ranks_per_node=1, started=1000.0)
    run.record("began", step=0)
    now = run.read_events()[-1]["time"]
    run.metrics.write_text(f'{{"step": 1, "loss": 3.0, "time": {now + 5}, "span": 3.0}}\n')
    monkeypatch.setattr(time, "time", lambda: now + 9)
    run.record("verdict", who="x", cause="code")
    run.update_results(name="a", status="failed", seconds={"total": 9.0})
    stages = read(run).stages
    assert (stages["useful"], stages["down"]) == (3.0, 4.0) and stages["start"] == pytest.approx(
        2, abs=0.9
    )
    assert stages.keys() - {"prepare"} == {
        "useful",
        "start",
        "down",
    }


def test_a_launcher_that_was_killed_counts_up_to_its_ranks_last_step() -> None:
    events = [event(0, "launched", started=0), event(2, "began", step=0), event(100, "launched", started=90),
              event(101, "began", step=2), event(105, "finished", step=3)]  # fmt: skip
    assert ledger(events, [line(1, 4, 2), line(2, 6, 2), line(3, 104, 3)]) == {
        "useful": 7.0, "start": 3.0, "prepare": 10.0, "checkpoint": 1.0
    }  # fmt: skip
