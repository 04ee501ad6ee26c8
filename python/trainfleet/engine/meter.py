"""Where the seconds went, and MFU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..heartbeat import Heart


class Stopwatch:
    """Seconds since `started` (unix time, when the user's command began), each in one stage.

    Training is what remains: time in the loop that is neither validation nor a checkpoint. The heart, if there is one, tells
    the watchdog which stage it is.
    """

    def __init__(self, started: float, heart: Heart | None = None) -> None:
        self.started, self.heart = started, heart
        self.place = "load", 0  # phase and step
        self.own = 0.0  # seconds of this step that this rank worked for itself, not waiting for others
        self.startup = 0.0
        self.to_first_step = 0.0
        self.before = 0.0  # seconds trained by earlier attempts that this one builds on
        self.last_stage = 0.0  # seconds that the last one took
        self.apart = {"validate": 0.0, "checkpoint": 0.0}

    def start_training(self, before: float) -> None:
        self.startup, self.before = self.total, before

    def begin(self, step: int) -> None:
        """A step begins; an attempt's first one may compile."""
        if self.heart:
            self.heart.busy, self.own = self.own, 0.0
        self._at("step" if self.to_first_step else "compile", step)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """What is done within it waits for no other rank: a rank that takes longer for it than the others is slow."""
        began = time.perf_counter()
        yield
        self.own += time.perf_counter() - began

    def _at(self, phase: str, step: int) -> None:
        self.place = phase, step
        if self.heart:
            self.heart.at(phase, step)

    def first_step(self) -> None:
        self.to_first_step = self.total

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts what is done within it as `name` and not as training."""
        began, (phase, step) = time.time(), self.place
        self._at(name, step)
        yield
        self._at(phase, step)
        self.last_stage = time.time() - began
        self.apart[name] += self.last_stage

    @property
    def total(self) -> float:
        return time.time() - self.started

    @property
    def training(self) -> float:
        """Seconds in steps, of this attempt."""
        return self.total - self.startup - sum(self.apart.values()) if self.startup else 0.0

    @property
    def trained(self) -> float:
        """Seconds in steps that count, of all attempts: steps that a crash lost are not among them."""
        return self.before + self.training

    def stages(self) -> dict[str, float]:
        """Seconds of each stage of this attempt; the last is their sum and what comes after training."""
        return {"startup": self.startup or self.total, "train": self.training, **self.apart, "total": self.total}


def count_parameters(model: nn.Module) -> int:
    """Trained numbers; a tied one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
