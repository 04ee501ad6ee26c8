"""Measures the use of the seconds, and MFU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from torch import Tensor, nn
from torch.compiler import disable
from torch.profiler import record_function

from ..health.heartbeat import Heart

# steps at most, since the device's clock was read last: slowness is judged by their mean
STEPS_JUDGED = 10
Item = TypeVar("Item")
# returns seconds on a device's clock, once the device has passed the event (devices/base.py)
Reading = Callable[[], float]


def now() -> Reading:
    """Returns a moment of the host's clock."""
    moment = time.perf_counter()
    return lambda: moment


class Stopwatch:
    """Counts seconds since `started` (unix time, when the user's command began), each in one stage.

    The rest is training: time in the loop that is neither validation nor a checkpoint. The
    heartbeat, if there is one, reports the stage to the watchdog. Logged steps are sampled: their
    parts are timed on the device's own clock (`clock`). It is read when the step is logged, as the
    host waits for the device then anyway.
    """

    def __init__(
        self,
        started: float,
        heart: Heart | None = None,
        clock: Callable[[], Reading] = now,
        at_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Starts counting; `at_step` is called with every step that begins."""
        self.started, self.heart, self.clock, self.at_step = started, heart, clock, at_step
        self.sampled = False
        self.spans: list[tuple[str, Reading, Reading]] = []  # spans of the sampled step
        # moments when the last gradient of the backward pass was computed
        self.computed: list[Reading] = []
        self.position = "load", 0  # phase and step
        # Times of the newest steps in which this rank did its own work, without waiting for others.
        self.work: deque[list[tuple[Reading, Reading]]] = deque(maxlen=STEPS_JUDGED)
        self.by_blocks = False  # blocks are timed one by one
        self.startup = 0.0
        self.to_first_step = 0.0
        # moments on the way to the first step: seconds since the command
        self.reached: dict[str, float] = {}
        self.before = 0.0  # seconds of training in earlier attempts on which this one builds
        self.last_stage = 0.0  # seconds of the last stage
        self.apart = {"validate": 0.0, "checkpoint": 0.0}

    def start_training(self, before: float) -> None:
        self.startup, self.before = self.total, before
        self.reached["built"] = self.startup

    def begin(self, step: int, sampled: bool = False) -> None:
        """Begins a step; an attempt's first one may compile."""
        self.at_step(step)
        self.sampled, self.spans = sampled, []
        self.work.append([])
        self._at("step" if self.to_first_step else "compile", step)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Times a forward pass on the device's clock: the host may be far ahead, and does not see
        that a device is slow.

        It is this rank's own work, unless its blocks wait for the weights of others: then
        `hear_blocks` times only those.
        """
        began = self.clock()
        with record_function("forward") if self.sampled else nullcontext():
            yield
        ended = self.clock()
        if self.sampled:
            self.spans.append(("forward", began, ended))
        if not self.by_blocks:
            self._worked(began, ended)

    def hear_blocks(self, blocks: Iterable[nn.Module]) -> None:
        """Counts as own work only the time of blocks after their weights have arrived, without the
        wait for them.

        Call it after the code that gathers weights has its hooks, as those must run before ours.
        """
        self.by_blocks = True
        for block in blocks:
            began: list[Reading] = []

            def begin(*_: object, began: list[Reading] = began) -> None:
                began[:] = [self.clock()]

            def end(*_: object, began: list[Reading] = began) -> None:
                if began:
                    self._worked(began.pop(), self.clock())

            for hook, register in (
                (begin, block.register_forward_pre_hook),
                (end, block.register_forward_hook),
            ):
                # it is not part of the compiled code
                register(disable(hook))  # type: ignore[no-untyped-call]

    def _worked(self, began: Reading, ended: Reading) -> None:
        if self.work:
            self.work[-1].append((began, ended))

    def tell(self) -> None:
        """Reports to the heartbeat how long the own work of the newest steps took; the device must
        be past them.
        """
        seconds = [sum(ended() - began() for began, ended in step) for step in self.work if step]
        self.work.clear()
        if self.heart and seconds:
            self.heart.busy = sum(seconds) / len(seconds)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times its body as that part of a sampled step, and names it in a profile; costs nothing
        in other steps.
        """
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
        """Registers a hook that notes when the last gradient is computed; the rest of the backward
        pass is communication.

        `first` is the model's first module: its output's gradient is computed last.
        """

        def listen(_: nn.Module, __: object, output: Tensor) -> None:
            if self.sampled and output.requires_grad:
                output.register_hook(lambda gradient: self.computed.append(self.clock()))  # type: ignore[no-untyped-call]

        first.register_forward_hook(listen)

    def fetch(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yields the same batches; the wait for each counts as `data`."""
        while True:
            with self.part("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def parts(self) -> dict[str, float]:
        """Returns seconds of each part of the step, if it was sampled; waits for the device."""
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
        self.work.clear()  # it was compiled too, which takes one rank longer than another

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
        """Seconds in steps, in this attempt."""
        return self.total - self.startup - sum(self.apart.values()) if self.startup else 0.0

    @property
    def trained(self) -> float:
        """Seconds in steps that count, in all attempts, without the steps that a crash lost."""
        return self.before + self.training

    def stages(self) -> dict[str, float]:
        """Returns seconds of each stage of this attempt; the last is their sum plus the time after
        training.
        """
        return {
            "startup": self.startup or self.total,
            "train": self.training,
            **self.apart,
            "total": self.total,
        }
