"""Shows the progress of a running job, as a progress bar on a terminal or as plain aligned lines in
a pipe or log.
"""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from ..health import fence
from ..health.heartbeat_format import newest_step
from ..process.processes import die_with_parent
from ..run.records import SOURCE_LOSS, Feed, Lines, check_metric
from ..run.run_folder import Record, Run
from ..trust.errors import S3Error
from ..trust.safe_output import discard, shown, unguarded
from .history import by_name, clock, decimal, describe, duration, number, percent, quantity

if TYPE_CHECKING:
    from rich.table import Table

    from ..data.progress import TokenizingProgress

Part = tuple[str, str]  # name (may be empty) and value
REMOTE_LOOK = 5.0  # seconds between updates of progress in S3 (data/dataset_store.py)
# Events that are shown below the line of the step that they follow.
AFTER_A_STEP = ("sampled", "checkpointed", "stopped", "finished")
PAGE = "trainfleet.report.html"
# Seconds until the page is first rendered, and between later renderings. A rendering takes about
# 1.5 s of one core.
FIRST, EVERY = (10.0, 20.0)
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
STYLES = {
    "fault": "red",
    "verdict": "red",
    "damaged": "red",
    "unsaved": "red",
    "logger-failed": "red",
    "stopped": "yellow",
    "notice": "yellow",
    "restarted": "yellow",
    "finished": "green",
}


class LiveLine:
    """Line that is redrawn in place on a terminal. Without a terminal, only `say` prints."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        # rich honors NO_COLOR (no-color.org)
        self.fancy = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        if self.fancy:
            from rich.console import Console
            from rich.live import Live as Area

            self.console = Console(file=unguarded(stream), highlight=False)
            self.area = Area(console=self.console, auto_refresh=False)
        self.awaited = ""
        self.unread = False  # whether the stream's reader has exited

    def say(self, text: str, style: str = "") -> None:
        """Prints a permanent line, above the live line if there is one."""
        if self.fancy:
            self.draw(lambda: self.console.print(shown(text), style=style or None, markup=False))
        else:
            self.draw(lambda: print(text, file=self.stream, flush=True))

    def draw(self, write: Callable[[], object]) -> None:
        """Calls `write`. Disables all output if the pipe's reader has exited or the terminal was
        closed.
        """
        try:
            write()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            self.unread = True
            for stream in (self.stream, sys.stderr) if error.errno == errno.EIO else (self.stream,):
                discard(stream)

    def wait(self, what: str, seconds: float) -> None:
        """Draws a spinner with the awaited event and the elapsed time. Without a terminal, prints
        the event once.
        """
        if self.fancy:
            from rich.text import Text

            turn = SPINNER[int(seconds * 10) % len(SPINNER)]
            text = Text.assemble((turn, "cyan"), f" {what} ", (duration(int(seconds)), "dim"))
            self.draw(lambda: self.area.update(text, refresh=True))
        elif what != self.awaited:
            self.awaited = what
            self.say(what)

    def bar(self, done: float, total: float, parts: list[Part]) -> None:
        """Draws a progress bar, followed by as many of `parts` as fit on the line."""
        if self.fancy:
            self.draw(
                lambda: self.area.update(_row(done, total, parts, self.console.width), refresh=True)
            )


def _row(done: float, total: float, parts: list[Part], width: int) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def text(parts: list[Part]) -> Text:
        return Text.assemble(
            "  ",
            *(
                (piece, look)
                for part in parts
                for piece, look in zip(part, ("dim", "bold"), strict=True)
            ),
        )

    parts = [(name, figure + "  ") for name, figure in parts]
    while len(parts) > 1 and text(parts).cell_len + 10 > width:
        parts = parts[:-1]
    size = max(4, min(40, width - text(parts).cell_len))
    row = Table.grid()
    row.add_row(
        ProgressBar(
            max(total, 1), min(done, total), size, complete_style="cyan", finished_style="green"
        ),
        text(parts),
    )
    return row


class Shown(ABC):
    """Context manager that displays a job. The launcher calls `update` about five times per
    second.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.line = LiveLine(stream or sys.stdout)
        self.started = time.monotonic()

    @abstractmethod
    def update(self, waits_for: str = "") -> None:
        """Reads new progress and redraws the display. If `waits_for` is set, shows what the job is
        waiting for.
        """

    def __enter__(self) -> Self:
        if self.line.fancy:
            self.line.area.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.update()
        finally:
            if self.line.fancy:
                self.line.draw(self.line.area.stop)


class Refresh:
    """Background process that renders the report. `look` starts another rendering if one is due and
    the run has new metrics.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.drawn = 0
        self.due = time.monotonic() + FIRST
        self.process: subprocess.Popen[bytes] | None = None

    def look(self) -> None:
        """Starts a rendering if one is due and the metrics have changed. Costs at most one stat
        call otherwise. If the process can't start, the page is not updated.
        """
        if time.monotonic() < self.due or (self.process and self.process.poll() is None):
            return
        self.due = time.monotonic() + EVERY
        with suppress(OSError):
            if (changed := self.run.metrics.stat().st_mtime_ns) != self.drawn:
                self.drawn, self.process = changed, _start(self.run)

    def close(self) -> None:
        """Kills a rendering in progress, because the final report supersedes it."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _start(run: Run) -> subprocess.Popen[bytes]:
    def prepare() -> None:
        die_with_parent()
        os.nice(19)

    words = [sys.executable, "-m", PAGE, str(run.folder)]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        words,
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        preexec_fn=prepare,
        start_new_session=True,
    )


class Live(Shown):
    """Display of a training run: one line that is updated in place, or one line per logged step.
    Events are printed permanently above it.
    """

    def __init__(self, run: Run, steps_total: int, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self.steps_total = steps_total
        self.metrics = Lines(run.metrics, check_metric)
        self.events = Feed(run.folder, tail=0)
        # A resume truncates metrics.jsonl, which makes `Lines` reread it from the start. Lines that
        # were already shown must not appear again.
        self.seen = set(map(json.dumps, self.metrics.new()))
        self.run = run
        self.prepared = _written(run.results)
        self.page = Refresh(run)
        self.newest: Record | None = None
        self.valid: float | None = None
        self.failed = False
        self.pace: tuple[int, float] | None = (
            None  # first step seen and its time, as the basis of the ETA
        )

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.page.close()
        super().__exit__(kind, *rest)

    def update(self, waits_for: str = "") -> None:
        self.page.look()
        events = self.events.new()
        for event in (event for event in events if event["event"] not in AFTER_A_STEP):
            self._show(event)
        for metric in self.metrics.new():
            if (key := json.dumps(metric)) not in self.seen:
                self.seen.add(key)
                self._take(metric)
        for event in (event for event in events if event["event"] in AFTER_A_STEP):
            self._show(event)
        if waits_for:
            self.line.wait(waits_for, time.monotonic() - self.started)
        elif self.newest:
            step = max(self.newest["step"], self._steps_done())
            self.line.bar(step, self.steps_total, self._parts(self.newest, step))
        elif not self.failed:
            # Rank 0 rewrites results.json once all ranks are connected and the model and data are
            # loaded.
            stage = (
                "starting ranks, loading data"
                if _written(self.run.results) == self.prepared
                else "first step"
            )
            self.line.wait(stage, time.monotonic() - self.started)

    def _steps_done(self) -> int:
        """Returns the number of completed steps according to the latest heartbeat, because metrics
        are logged only every few steps. Returns 0 if there is no progress bar.
        """
        at = (
            newest_step(self.run.folder, fence.current(self.run.folder).number)
            if self.line.fancy
            else 0
        )
        return max(0, min(at - 1, self.steps_total))

    def _show(self, event: Record) -> None:
        kind = event["event"]
        if kind in ("verdict", "queued") or (kind == "fault" and self.failed):
            # The verdict is printed once all ranks have stopped, and the live line already shows
            # what a queued job is waiting for. Faults after the first are assumed to be
            # consequences of it.
            return
        self.failed = kind == "fault" or (self.failed and kind != "restarted")
        self.line.say(f"  {kind:<12} {describe(event)}".rstrip(), STYLES.get(kind, "dim"))
        if kind in ("restarted", "resumed"):
            self.newest = None
            self.pace = None
            self.started = time.monotonic()

    def _take(self, metric: Record) -> None:
        self.newest = metric
        self.newest_at = time.monotonic()
        self.pace = self.pace or (metric["step"], self.newest_at)
        fresh = number(metric.get("valid_loss"))
        self.valid = self.valid if fresh is None else fresh
        if not self.line.fancy:
            shown = [
                f"{name}{figure}"
                for name, figure in self._parts(metric, metric["step"])
                if fresh is not None or name != "valid "
            ]
            parts = {
                key.removeprefix(SOURCE_LOSS): value
                for key, value in metric.items()
                if key.startswith(SOURCE_LOSS)
            }
            self.line.say("  ".join([*shown, *[f"({by_name(parts, decimal)})"] * bool(parts)]))

    def _parts(self, metric: Record, step: int) -> list[Part]:
        mfu = number(metric.get("mfu"))
        return [
            ("step ", f"{step:>{len(str(self.steps_total))}}/{self.steps_total}"),
            ("loss ", f"{decimal(metric.get('loss')):>6}"),
            ("", f"{quantity(number(metric.get('tokens_per_second'))):>5} tokens/s"),
            ("ETA ", f"{clock(self._left(metric)):>5}"),
            *([("MFU ", f"{percent(mfu):>6}")] if mfu is not None else []),
            *(
                [("cores ", f"{used:.0f} %")]
                if (used := number(metric.get("core_utilization"))) is not None
                else []
            ),
            *([("valid ", decimal(self.valid))] if self.valid is not None else []),
        ]

    def _left(self, metric: Record) -> float | None:
        """Returns the estimated seconds until the last step, from the average pace since the first
        step seen. The pace includes validation and checkpoints.
        """
        first, began = self.pace or (metric["step"], 0.0)
        if metric["step"] <= first:
            return None
        seconds_per_step = (self.newest_at - began) / (metric["step"] - first)
        left = seconds_per_step * (self.steps_total - metric["step"])
        return float(max(0.0, left - (time.monotonic() - self.newest_at)))


def _written(path: Path) -> int:
    """Returns a file's modification time in nanoseconds, or 0 if the file does not exist."""
    return path.stat().st_mtime_ns if path.exists() else 0


class TokenizeLive(Shown):
    """Display of a tokenization job, based on the progress that the workers write to the dataset's
    folder, or to S3 at `address`.
    """

    def __init__(
        self,
        folder: Path,
        address: str | None = None,
        stream: TextIO | None = None,
        every: float = 2.0,
    ) -> None:
        """Without a progress bar, prints one line every `every` seconds."""
        super().__init__(stream)
        self.folder = folder
        self.address = address
        self.every = every
        self.look_every = REMOTE_LOOK if address else 0.0
        self.looked = -math.inf
        self.progress: TokenizingProgress | None = None
        self.said = self.started
        self.ended = False
        self.first: int | None = None  # bytes completed by an earlier job

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.looked = -math.inf  # force a final update
        super().__exit__(kind, *rest)

    def update(self, waits_for: str = "") -> None:
        now = time.monotonic()
        if waits_for:
            self.line.wait(waits_for, now - self.started)
            return
        if now - self.looked >= self.look_every:
            self.looked = now
            self._look()
        progress = self.progress
        if progress and progress.bytes_done:
            return self._show(progress, now)
        self.first = 0
        self.began = now
        stage = (
            "preparing the tokenizer" if progress and progress.bytes_total else "listing sources"
        )
        self.line.wait(stage, now - self.started)

    def _show(self, progress: TokenizingProgress, now: float) -> None:
        done, total = progress.bytes_done, progress.bytes_total
        if self.first is None:
            self.first = done
            self.began = now
        pace = (done - self.first) / max(now - self.began, 1e-3)
        left = (total - done) / pace if pace else None
        parts = [
            ("", f"{done / 1e6:.1f}/{total / 1e6:.1f} MB"),
            ("", f"{pace / 1e6:.1f} MB/s"),
            ("ETA ", f"{clock(left):>5}"),
            ("", f"{quantity(progress.tokens)} tokens"),
            ("", f"{progress.documents:,} documents"),
        ]
        self.line.bar(done, total, parts)
        is_due = progress.finished or now - self.said >= self.every
        if is_due and not (self.line.fancy or self.ended):
            self.said = now
            self.ended = progress.finished
            self.line.say("  ".join(name + figure for name, figure in parts))

    def _look(self) -> None:
        from ..data.progress import read_progress

        # If S3 is unavailable, the workers report it and end the job.
        with suppress(S3Error):
            self.progress = read_progress(self.folder, self.address)
