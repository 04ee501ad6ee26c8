"""Rank 0's training record in the run folder: metrics.jsonl, results.json, events and
TensorBoard.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..config.schedule import learning_rate
from ..config.types import Train
from ..data.dataset import Dataset
from ..data.sources import epochs, repeated
from ..run.loggers import Loggers
from ..run.records import SOURCE_LOSS, VALID_LOSS
from ..run.run_folder import Record, Run, append_line, write_atomic
from ..trust.errors import RunError
from .checkpoint import Saved, TrainingProgress
from .timing import Slowest, Stopwatch

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# fields of a metrics line that account for elapsed time
SPAN = ("time", "span", "in_validate", "in_checkpoint", "in_compile")
SOURCES = 100  # maximum number of data sources in results.json
# Minimum interval between writes of results.json, in seconds. Each write waits for the disk.
RESULTS_EVERY = 5.0


class Recorder:
    """Writes a run's metrics, results and events.

    When a run resumes, drops the metrics that the failed attempt logged after `progress.step`.
    `load` is the model's FLOPs per token divided by the combined peak FLOP/s of all ranks, so MFU
    is `load` times tokens per second.
    """

    def __init__(
        self,
        run: Run,
        train: Train,
        progress: TrainingProgress,
        watch: Stopwatch,
        load: float,
        loggers: Loggers | None = None,
        slowest: Slowest | None = None,
    ) -> None:
        self.run = run
        self.train = train
        self.progress = progress
        self.watch = watch
        self.load = load
        self.loggers = loggers
        self.slowest = slowest
        self.resumed = progress.step
        self.last = self.resumed, 0.0  # step and training seconds as of the last metrics line
        # wall-clock time and time outside steps, as of the last metrics line
        self.written, self.apart = time.time(), dict.fromkeys(watch.apart, 0.0)
        self.lines = self._lines_before()
        run.record("began", step=self.resumed)
        # seconds per stage in earlier attempts
        self.spent: dict[str, float] = run.read_results().get("seconds") or {}
        self.board: SummaryWriter | None = None
        self.updated = 0.0
        # writes that are queued until the full disk has space again
        self.owed: list[Callable[[], None]] = []
        self.complained = False
        write_atomic(run.metrics, "".join(json.dumps(line) + "\n" for line in self.lines))

    def _lines_before(self) -> list[Record]:
        """Returns the metrics of earlier attempts, and records those after the resumed step as
        lost.
        """
        before = list(self.run.read_metrics())
        if lost := [line for line in before if line["step"] > self.resumed]:
            spans = [{key: line[key] for key in SPAN if key in line} for line in lost]
            steps = lost[-1]["step"] - self.resumed
            self.run.record("lost", step=self.resumed, steps=steps, spans=spans)
        return [line for line in before if line["step"] <= self.resumed]

    def step(self, loss: float, norm: float, valid: Record, meters: Record) -> None:
        """Logs the metrics of the latest step.

        `valid` contains the validation losses, and `meters` the number of skipped steps, device
        metrics and the loss scale.
        """
        (logged, before), now, step = self.last, self.watch.training, self.progress.step
        self.last = step, now
        seconds = (now - before) / (step - logged)
        speed = self.train.global_batch_size * self.train.sequence_length / seconds
        line = {
            "step": step,
            "loss": loss,
            "tokens": self.progress.tokens,
            "tokens_per_second": round(speed, 1),
            "mfu": round(speed * self.load, 4),
            "lr": learning_rate(self.train, step),
            "grad_norm": norm,
            "seconds": round(seconds, 4),
            **(self.slowest.measure() if self.slowest else {}),
            **meters,
            **self._span(first=logged == self.resumed),
        }
        text = f"step {step:,}  loss {loss:.4f}  {speed:.0f} tokens/s"
        losses = [f"  {name.replace(VALID_LOSS, 'validation')} {valid[name]:.4f}" for name in valid]
        self._tell_skips(line)
        self._append(line | valid)
        print(text, *losses, sep="")
        if time.monotonic() - self.updated > RESULTS_EVERY:
            self._try(self.update)

    def sampled(self, prompt: str, text: str) -> None:
        """Records a generated text sample as an event."""
        self._record("sampled", step=self.progress.step, prompt=prompt, text=text)

    def _span(self, first: bool) -> dict[str, float]:
        """Returns the seconds per part of this step, the current time, and the seconds since the
        last line, both in total and per stage.

        watch/time_accounting.py reads these fields.
        """
        parts = {f"{name}_seconds": round(spent, 5) for name, spent in self.watch.parts().items()}
        now, apart = time.time(), dict(self.watch.apart)
        since = {f"in_{name}": round(apart[name] - self.apart[name], 3) for name in apart}
        compiling = (
            {"in_compile": round(self.watch.to_first_step - self.watch.startup, 3)} if first else {}
        )
        span = round(now - self.written, 3)
        self.written, self.apart = now, apart
        return parts | {"time": round(now, 3), "span": span, **since, **compiling}

    def _tell_skips(self, line: Record) -> None:
        """Records and prints the number of steps skipped since the last line, including fp16
        overflows.
        """
        why = {
            "skipped": "loss or gradients not finite or far above average",
            "overflowed": "gradients overflowed fp16; the loss scale is now "
            f"{line.get('loss_scale', 0):g}",
        }
        for event, words in why.items():
            before = self.lines[-1].get(event, 0) if self.lines else 0
            if (steps := line.get(event, 0) - before) > 0:
                self._record(event, step=self.progress.step, steps=steps)
                print(f"{steps} steps skipped: {words}")

    def saved(self, news: list[Saved]) -> None:
        """Records finished saves, and prints failed ones."""
        for save in news:
            if save.error is None:
                self._record("checkpointed", step=save.step, seconds=round(save.seconds, 3))
                self._try(lambda address=save.address: self.update(last_checkpoint=address))  # type: ignore[misc]
            else:
                self._record("unsaved", step=save.step, message=save.error.what, why=save.error.why)
                # Print the cause first, and on one line, so that a later failure isn't blamed on
                # this error.
                why = f"{save.error.why} ({save.error.what}); {save.error.next}"
                print(f"step {save.step:,} was not saved: {why}")

    def update(self, **fields: Any) -> None:
        """Updates results.json with the current progress and the given fields."""
        self.updated = time.monotonic()
        stages = self.watch.stages()
        seconds = self.spent | {
            name: round(self.spent.get(name, 0.0) + value, 3) for name, value in stages.items()
        }
        seconds |= {name: round(moment, 3) for name, moment in self.watch.reached.items()}
        self.run.update_results(
            steps=self.progress.step,
            tokens=self.progress.tokens,
            seconds=seconds,
            goodput=round(self.watch.trained / seconds["total"], 4),
            **summary(self.lines),
            **fields,
        )

    def _record(self, event: str, **fields: Any) -> None:
        """Records an event, or queues it until the disk has space."""
        self._write(lambda: self.run.record(event, **fields))

    def _write(self, act: Callable[[], None]) -> None:
        """Performs all queued writes and this one, in order.

        A full disk never stops training.
        """
        self.owed.append(act)
        self._try(self._settle)

    def _settle(self) -> None:
        while self.owed:
            self.owed[0]()
            self.owed.pop(0)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (RunError, OSError) as error:
            if not self.complained:
                self.complained = True
                why = f"{error.what}: {error.why}" if isinstance(error, RunError) else str(error)
                print(f"training continues; its records are queued until the disk has space: {why}")

    def close(self, status: str = "finished") -> None:
        """Performs all queued writes and closes TensorBoard and the loggers.

        Raises:
            RunError: the disk is still full.
        """
        self._settle()
        if self.board is not None:
            self.board.close()
        if self.loggers:
            self.loggers.close(status)

    def _append(self, line: Record) -> None:
        """Appends a line to metrics.jsonl, TensorBoard and the loggers.

        Non-finite numbers become null, because JSON has no NaN.
        """
        line = {key: value if math.isfinite(value) else None for key, value in line.items()}
        self.lines.append(line)
        self._write(lambda: append_line(self.run.metrics, line))
        self._try(lambda: self._show(line))
        if self.loggers:
            self.loggers.log(
                line["step"],
                {
                    f"train/{key}": value
                    for key, value in line.items()
                    if key not in SPAN and value is not None
                },
            )

    def _show(self, line: Record) -> None:
        """Writes a metrics line to TensorBoard.

        After a failure, the next line goes to a new file.
        """
        board, self.board = self._board(), None
        for key, value in line.items():
            if key not in ("step", *SPAN) and value is not None:
                board.add_scalar(f"train/{key}", value, line["step"])
        board.flush()
        self.board = board

    def _board(self) -> SummaryWriter:
        """Returns the TensorBoard writer, opened on first use.

        Its half-second import would otherwise delay the first step.
        """
        if self.board is None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.run.tensorboard), purge_step=self.resumed + 1)
        return self.board


def dataset_facts(config: Config, dataset: Dataset) -> Record:
    """Returns the data fields of results.json, including the epochs over each mixture source."""
    manifest, train = dataset.manifest, config.train
    passes = epochs(config.data, manifest.source_tokens, config.step_tokens * train.steps)
    facts: Record = {
        "dataset": config.data.name,
        "dataset_tokens": manifest.tokens,
        "dataset_skipped": manifest.skipped,
        "dataset_notes": [*dataset.notes(train.sequence_length), *repeated(passes)],
    }
    most = dict(islice(passes.items(), SOURCES))
    return facts | ({"source_epochs": most} if len(most) > 1 else {})


def summary(lines: list[Record]) -> Record:
    """Returns the first and final loss, the last validation losses, and the median throughput and
    MFU.

    The medians exclude the first line unless it is the only one.
    """
    if not lines:
        return {}
    steady = lines[1:] or lines
    found: Record = {"first_loss": lines[0]["loss"], "final_loss": lines[-1]["loss"]}
    for key in ("tokens_per_second", "mfu"):
        values = [line[key] for line in steady if line[key] is not None]
        found[key] = median(values) if values else None
    validated = next((line for line in reversed(lines) if VALID_LOSS in line), {})
    if validated:
        found[VALID_LOSS] = validated[VALID_LOSS]
    by_source = {
        name.removeprefix(SOURCE_LOSS): validated[name]
        for name in validated
        if name.startswith(SOURCE_LOSS)
    }
    return found | ({"valid_losses": by_source} if by_source else {})
