"""Where the seconds went, and MFU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor, nn
from torch.profiler import record_function

from ..heartbeat import Heart

Item = TypeVar("Item")
Reading = Callable[[], float]  # seconds on a device's clock, once the device has passed the event (devices/base.py)


def now() -> Reading:
    """A moment of the host's clock."""
    moment = time.perf_counter()
    return lambda: moment


class Stopwatch:
    """Seconds since `started` (unix time, when the user's command began), each in one stage.

    Training is what remains: time in the loop that is neither validation nor a checkpoint. The heartbeat, if there is one, tells
    the watchdog which stage it is. Steps that are logged are sampled: their parts are timed on the device's own clock (`clock`),
    which is read when the step is logged, as the host waits for the device then in any case.
    """

    def __init__(
        self,
        started: float,
        heart: Heart | None = None,
        clock: Callable[[], Reading] = now,
        at_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`at_step` is called with every step that begins."""
        self.started, self.heart, self.clock, self.at_step = started, heart, clock, at_step
        self.sampled = False
        self.spans: list[tuple[str, Reading, Reading]] = []  # of the sampled step
        self.computed: list[Reading] = []  # when the last gradient of the backward pass was computed
        self.position = "load", 0  # phase and step
        self.own = 0.0  # seconds of this step that this rank worked for itself, not waiting for others
        self.startup = 0.0
        self.to_first_step = 0.0
        self.reached: dict[str, float] = {}  # on the way to the first step: seconds from the command until then
        self.before = 0.0  # seconds trained by earlier attempts that this one builds on
        self.last_stage = 0.0  # seconds that the last one took
        self.apart = {"validate": 0.0, "checkpoint": 0.0}

    def start_training(self, before: float) -> None:
        self.startup, self.before = self.total, before
        self.reached["built"] = self.startup

    def begin(self, step: int, sampled: bool = False) -> None:
        """A step begins; an attempt's first one may compile."""
        self.at_step(step)
        self.sampled, self.spans = sampled, []
        if self.heart:
            self.heart.busy, self.own = self.own, 0.0
        self._at("step" if self.to_first_step else "compile", step)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Times work that waits for no other rank: a rank that needs longer for it than the others is slow."""
        began = time.perf_counter()
        with self.part("forward"):
            yield
        self.own += time.perf_counter() - began

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times its body as that part of a sampled step, and names it in a profile; costs nothing in other steps."""
        if not self.sampled:
            yield
            return
        began = self.clock()
        self.computed.clear()
        with record_function(name):
            yield
        ended = self.clock()
        for computed in self.computed[-1:]:
            self.spans.append(("communication", computed, ended))
            ended = computed
        self.spans.append((name, began, ended))

    def hear(self, first: nn.Module) -> None:
        """Registers a hook that notes when the last gradient is computed; what is left of the backward pass is communication.

        `first` is the model's first module, whose output's gradient is computed last.
        """

        def listen(_: nn.Module, __: object, output: Tensor) -> None:
            if self.sampled and output.requires_grad:
                output.register_hook(lambda gradient: self.computed.append(self.clock()))  # type: ignore[no-untyped-call]

        first.register_forward_hook(listen)

    def fetch(self, batches: Iterator[Item]) -> Iterator[Item]:
        """The same batches; the wait for each counts as `data`."""
        while True:
            with self.part("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def parts(self) -> dict[str, float]:
        """Seconds of each part of the step, if it was sampled; waits for the device."""
        found: dict[str, float] = {}
        for name, began, ended in self.spans:
            found[name] = found.get(name, 0.0) + ended() - began()
        return found

    def _at(self, phase: str, step: int) -> None:
        self.position = phase, step
        if self.heart:
            self.heart.at(phase, step)

    def first_step(self) -> None:
        self.to_first_step = self.reached["first_step"] = self.total

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time of its body as `name` and not as training."""
        began, (phase, step) = time.time(), self.position
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
