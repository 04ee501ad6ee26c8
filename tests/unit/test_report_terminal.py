"""The live line on a real terminal and in a pipe, the summary and the status."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from report_runs import make_run, metric

from trainfleet.health.heartbeat_format import Beat, write_beats
from trainfleet.report.html import write
from trainfleet.report.live import Live, LiveLine, TokenizeLive
from trainfleet.report.summary import opening, print_summary, status
from trainfleet.run.run_folder import Run, append_line, take_lock, write_atomic


def log(run: Run, *steps: int) -> None:
    for step in steps:
        append_line(run.metrics, metric(step, 500))


def on_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """What a terminal of 100 columns receives while the run logs two steps and commits a checkpoint."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm-256color", "COLUMNS": "100"} | environment).items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as stream:
        with Live(run, 500, stream) as live:
            live.update()
            run.update_results(device="cpu")  # as rank 0 does before its first step
            live.update()
            log(run, 50, 55)
            run.record("checkpointed", step=50, seconds=0.3)
        shown = b""
        while select.select([ours], [], [], 0.1)[0]:
            shown += os.read(ours, 4096)
    os.close(ours)
    return shown.decode()


def test_terminal_gets_one_line_that_is_kept_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = on_terminal(make_run(tmp_path, done=0, status="running"), monkeypatch)
    assert "\x1b[" in shown and "━" in shown and "\r" in shown
    for expected in (
        "starting ranks",
        "first step",
        "checkpointed step 50 · 0.3 s",
        " 55/500",
        "5.458",
        "tokens/s",
    ):
        assert expected in shown


def test_without_colours_the_bar_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_terminal(make_run(tmp_path, done=0, status="running"), monkeypatch, NO_COLOR="1")
    assert "━" in shown and "\r" in shown and " 55/500" in shown
    assert not re.search(r"\x1b\[[\d;]*(3|4|9|10)[0-9]m", shown)  # the codes of colours


def test_the_bar_moves_with_every_step_that_a_heartbeat_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, done=0, status="running")
    write_beats(
        run.folder, 0, 0, [Beat(0, 0, 7, 0, "step", 59, 0.1, time.time())]
    )  # it is in step 59: 58 are done
    assert " 58/500" in on_terminal(run, monkeypatch)


def test_plain_terminal_gets_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_terminal(make_run(tmp_path, done=0, status="running"), monkeypatch, TERM="dumb")
    assert "\x1b" not in shown and "━" not in shown
    assert "step  55/500" in shown


def test_pipe_gets_a_line_each_logged_step(tmp_path: Path) -> None:
    run, out = make_run(tmp_path, done=0, status="running"), io.StringIO()
    with Live(run, 500, out) as live:
        live.update()
        log(run, 5, 10)
        live.update()
        live.update()
        run.record("fault", rank=1, message="lost")
        run.record("fault", rank=0, message="its peer is lost")
        run.record("verdict", who="rank 1", cause="lost-node", words="lost")
        log(run, 50, 55)  # the last look is taken when the block ends
    lines = out.getvalue().splitlines()
    assert [line.split("  loss")[0] for line in lines[1:3]] == ["step   5/500", "step  10/500"]
    assert lines[0] == "starting ranks, loading data" and lines[3] == "  fault        rank 1 · lost"
    assert "verdict" not in out.getvalue()  # it follows as a block of its own
    assert lines[4].endswith("valid 5.643") and "valid" not in lines[5] and len(lines) == 6
    assert len({line.index("tokens/s") for line in lines if "tokens/s" in line}) == 1  # aligned


def test_what_comes_of_a_step_is_said_below_its_line(tmp_path: Path) -> None:
    run, out = make_run(tmp_path, done=0, status="running"), io.StringIO()
    with Live(run, 500, out):
        run.record("resumed", step=490)
        run.record("finished", step=500)
        log(run, 495, 500)
    lines = [line.split()[:2] for line in out.getvalue().splitlines()]
    assert lines == [
        ["resumed", "step"],
        ["step", "495/500"],
        ["step", "500/500"],
        ["finished", "step"],
    ]


def test_time_left_is_measured_anew_after_a_restart(tmp_path: Path) -> None:
    run, out = make_run(tmp_path, done=0, status="running"), io.StringIO()
    with Live(run, 500, out) as live:
        for step in (5, 10):
            log(run, step)
            live.update()
        run.record("restarted", without="node 1")
        log(run, 15)
    times = [
        line.split("ETA")[1].split()[0] for line in out.getvalue().splitlines() if "ETA" in line
    ]
    assert times[0] == times[2] == "—" != times[1]


def test_resumed_run_shows_only_what_is_new(tmp_path: Path) -> None:
    run, out = make_run(tmp_path, done=20, status="running"), io.StringIO()
    old = run.metrics.read_text().splitlines(keepends=True)
    with Live(run, 500, out) as live:
        write_atomic(
            run.metrics, "".join(old[:2])
        )  # what the engine does when it resumes at step 10
        live.update()
        append_line(run.metrics, metric(15, 500) | {"seconds": 0.5})  # done again, in other seconds
        live.update()
    assert [line.split()[1] for line in out.getvalue().splitlines() if line.startswith("step")] == [
        "15/500"
    ]


def test_broken_loss_is_said(tmp_path: Path) -> None:
    run, out = make_run(tmp_path, done=0, status="running"), io.StringIO()
    with Live(run, 500, out):
        append_line(
            run.metrics,
            metric(5, 500) | {"loss": float("nan"), "mfu": None, "tokens_per_second": None},
        )
    assert "loss    nan" in out.getvalue() and "MFU" not in out.getvalue()


def test_narrow_terminal_drops_the_last_parts_first() -> None:
    from rich.console import Console

    from trainfleet.report.live import _row

    parts = [
        ("step ", "10/500"),
        ("loss ", "5.000"),
        ("", "17k tokens/s"),
        ("ETA ", "0:10"),
        ("MFU ", "31 %"),
    ]
    for width in (30, 60, 90):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(_row(10, 500, parts, width))
        text = console.export_text().rstrip("\n")
        assert (
            len(text) <= width
            and "10/500" in text
            and ("MFU" in text) == (width == 90)
            and "\n" not in text
        )


def test_tokenizing_shows_bytes_speed_and_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainfleet.data import progress

    out = io.StringIO()
    seen = iter([(0, 0, 0), (0, 40, 0), (10, 40, 1), (40, 40, 4), (40, 40, 4)])
    total = 4

    def read(folder: Path, address: str | None) -> progress.TokenizingProgress:
        done, size, units = next(seen)
        return progress.TokenizingProgress(
            done * 10**6, size * 10**6, done * 100, done * 250_000, units, total
        )

    monkeypatch.setattr(progress, "read_progress", read)
    with TokenizeLive(tmp_path, stream=out, every=0.0) as live:
        for _ in range(4):
            live.update()
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["listing sources", "preparing the tokenizer"]
    assert (
        lines[2].startswith("10.0/40.0 MB")
        and lines[3].startswith("40.0/40.0 MB")
        and len(lines) == 4
    )
    assert "10M tokens" in lines[3] and "4,000 documents" in lines[3]


def test_summary_ends_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, out = make_run(Path("runs")), io.StringIO()
    run.report.touch()
    print_summary(run, out)
    lines = out.getvalue().splitlines()
    assert lines[1] == "first-run   finished · step 500 of 500 (100 %)"
    assert "report      runs/first-run/report.html" in lines
    assert "step        backward 64 %, forward 32 %, optimizer 4 %, data 0 %" in lines
    assert "checkpoint  s3://bucket/first-run/step-00000500" in lines
    assert (
        lines[-1]
        .strip()
        .startswith("make sample CONFIG=runs/first-run/config.yaml PROMPT='The '  ")
    )
    Path("config.yaml").write_text("name: first-run  # mine\n")
    print_summary(run, out := io.StringIO())
    assert "make train SET='train.steps=1000'" in out.getvalue() and "CONFIG=" not in out.getvalue()


PROMPTS = {
    "es of the king's men and women said": "of the king's ", "halb \u00fcber der  Br\u00fccke\n  steht ein Haus": "steht ein Haus ", "a $HOME `id` b": "$HOME `id` b ",
    "a b\x1b[2J c d e": "c d e ", "word": "The ", "": "The ", "a " + "long" * 20: "The ",
    "    return 0\n\n    @classmethod\n    def fit(self, x):\n": "def fit(self, x): ", "1\tyes\n2\tno it is not": "2 no it ", "cut\r\nWer\r\n": "Wer ",
    ' the sand. Even the snail had to clap. "My drum!" said Ella.': "Even the snail ",
}  # fmt: skip


@pytest.mark.parametrize("text", PROMPTS)
def test_a_summary_proposes_some_words_of_the_data_as_a_shell_takes_them(
    text: str, tmp_path: Path
) -> None:
    """Those that make sample begins with where none are typed."""
    run = make_run(tmp_path)
    run.update_results(sample={"prompt": text, "text": "x"})
    print_summary(run, out := io.StringIO())
    word = next(
        word for word in shlex.split(out.getvalue().splitlines()[-1]) if word.startswith("PROMPT=")
    )
    assert word == f"PROMPT={PROMPTS[text]}" == f"PROMPT={opening(run.read_results())}"


def test_status_page_and_summary_say_how_often_the_data_was_seen(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.update_results(dataset_tokens=4_096_000, dataset_skipped=3)
    assert "data        2.05M tokens, 0.5 epochs of 4.1M; 3 bad records skipped" in status(run)
    write(run)
    assert "; 0.5 epochs; 3 bad records skipped" in run.report.read_text()
    run.update_results(
        dataset_tokens=1_024_000, dataset_skipped=0, dataset_notes=["2 files of x are not read"]
    )
    assert "data        2.05M tokens, 2 epochs of 1.02M\n" in status(run)
    assert "note        2 files of x are not read\n" in status(run)
    run.update_results(dataset_notes=[f"unit {n}: 1 file skipped" for n in range(6)])
    assert "skipped\nnote        4 more in " in status(run) and "unit 2" not in status(run)
    assert "epochs" not in status(make_run(tmp_path, name="older"))


def test_status_tells_running_from_interrupted(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=210, status="running", tokens=None)
    lock = take_lock(run.folder)
    assert lock is not None
    with lock:
        text = status(run)
    assert "running · step 210 of 500 (42 %)" in text and "1 min" in text and "make stop" in text
    assert "checkpoint  step 200" in text
    assert "interrupted" in status(run) and "resumes from step 200" in status(run)
    run.update_results(unattended=True)  # its launcher need not stay
    assert "running" in status(run)


def test_a_run_that_did_more_than_is_asked_for_now_is_at_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.config.write_text(run.config.read_text().replace("steps: 500", "steps: 12"))
    said = status(run)
    assert "finished · step 500 of 500 (100 %)" in said and "train.steps=1000" in said


def test_a_reader_that_leaves_is_noticed_and_nothing_is_written_for_it_any_more() -> None:
    """As in `make train | head`: the launcher then stops the run with a checkpoint, as when its terminal is closed."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        line = LiveLine(stream)
        line.say("one")
        assert not line.unread and os.read(reading, 99) == b"one\n"
        os.close(reading)
        line.say("two")
        assert line.unread
        line.say("three")
        print("four", file=stream, flush=True)


def test_a_terminal_that_is_closed_is_noticed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SIGHUP asks for a clean stop; words for it must not end the launcher before that."""
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(slave, "w") as stream, os.fdopen(os.dup(slave), "w") as errors:
        monkeypatch.setattr(sys, "stderr", errors)
        line = LiveLine(stream)
        line.area.start()
        line.wait("one", 1.0)
        assert line.fancy and not line.unread
        os.close(master)
        line.bar(1, 2, [("step ", "1")])
        line.say("two")
        assert line.unread
        line.say("three")
        line.draw(line.area.stop)
        print("four", file=errors, flush=True)


def test_a_finished_run_without_validation_text_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=100)
    assert "validation" in status(run) and "remark" not in status(run)
    lines = [
        {key: value for key, value in metric(step, 100).items() if key != "valid_loss"}
        for step in range(1, 101)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "the validation text is too short" in status(run)


def test_status_before_anything(tmp_path: Path) -> None:
    assert status(Run(tmp_path / "none")).startswith("none  not started\nnext  make train")


def test_looking_at_a_run_is_quick_to_import() -> None:
    code = (
        "import sys; import trainfleet.report.live, trainfleet.report.summary, trainfleet.report.html, json;"
        "print(json.dumps([name for name in ('torch', 'matplotlib', 'rich', 'numpy', 'yaml') if name in sys.modules]))"
    )
    root = Path(__file__).parents[2] / "python"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert json.loads(ran.stdout) == []


def test_what_was_predicted_stands_beside_what_was_measured(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    predicted = {"tokens_per_second": 900.0, "memory_bytes": 3.0e9, "usd": 2.5}
    run.update_results(device="cuda", memory_bytes=3.1e9, usd=2.75, predicted=predicted)
    assert "3.1 GB per rank · predicted 3.0 GB" in status(
        run
    ) and "$2.75 · predicted $2.50" in status(run)
    write(run)
    page = run.report.read_text()
    assert "predicted 900" in page and "predicted 3.0 GB" in page and "predicted $2.50" in page
    run.update_results(device="cpu", predicted=None)
    assert "predicted" not in status(run) and "per rank" not in status(run)


def test_after_a_stop_the_step_is_the_one_that_was_saved(tmp_path: Path) -> None:
    """Metrics are logged every ten steps; a stop comes at any."""
    told = status(make_run(tmp_path, done=58, every=10, status="stopped"))
    assert "stopped · step 58 of 500" in told
    assert "running · step 50 of 500" in status(
        make_run(tmp_path, name="other", done=58, every=10, status="running", unattended=True)
    )
