"""Where the seconds went, and MFU."""

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

STEPS_JUDGED = (
    10  # at most, since the device's clock was read last: slowness is that of a mean of them
)
Item = TypeVar("Item")
# seconds on a device's clock, once the device has passed the event (devices/base.py)
Reading = Callable[[], float]


def now() -> Reading:
    """A moment of the host's clock."""
    moment = time.perf_counter()
    return lambda: moment


class Stopwatch:
    """Seconds since `started` (unix time, when the user's command began), each in one stage.

    Training is what remains: time in the loop that is neither validation nor a checkpoint. The
    heartbeat, if there is one, tells the watchdog which stage it is. Steps that are logged are
    sampled: their parts are timed on the device's own clock (`clock`), which is read when the step
    is logged, as the host waits for the device then in any case.
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
        self.computed: list[
            Reading
        ] = []  # when the last gradient of the backward pass was computed
        self.position = "load", 0  # phase and step
        # Of the newest steps: from when to when this rank worked for itself, not waiting for
        # others.
        self.work: deque[list[tuple[Reading, Reading]]] = deque(maxlen=STEPS_JUDGED)
        self.by_blocks = False  # whether blocks are timed one by one
        self.startup = 0.0
        self.to_first_step = 0.0
        self.reached: dict[
            str, float
        ] = {}  # on the way to the first step: seconds from the command until then
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
        self.work.append([])
        self._at("step" if self.to_first_step else "compile", step)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Times a forward pass on the device's clock: the host may long be ahead, and knows nothing
        of a device that is slow.

        It is this rank's own work, unless blocks in it wait for the weights of others: then
        `hear_blocks` times those alone.
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
        """Takes for own work what blocks do once their weights are there, and not how long these
        were waited for.

        To be called when whatever gathers weights has its hooks, as those must run before ours do.
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
                # it is no part of what is compiled
                register(disable(hook))  # type: ignore[no-untyped-call]

    def _worked(self, began: Reading, ended: Reading) -> None:
        if self.work:
            self.work[-1].append((began, ended))

    def tell(self) -> None:
        """Tells the heartbeat how long a step's own work took, of the newest steps; the device must
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
        """Registers a hook that notes when the last gradient is computed; what is left of the
        backward pass is communication.

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
        """Seconds in steps, of this attempt."""
        return self.total - self.startup - sum(self.apart.values()) if self.startup else 0.0

    @property
    def trained(self) -> float:
        """Seconds in steps that count, of all attempts: steps that a crash lost are not among
        them.
        """
        return self.before + self.training

    def stages(self) -> dict[str, float]:
        """Seconds of each stage of this attempt; the last is their sum and what comes after
        training.
        """
        return {
            "startup": self.startup or self.total,
            "train": self.training,
            **self.apart,
            "total": self.total,
        }
