"""Measures the time per stage, finds the slowest rank, and profiles selected steps.

The profiler writes a trace for a viewer and a summary.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.compiler import disable
from torch.profiler import profile, record_function

from ..health.heartbeat import Heart
from ..health.heartbeat_format import Beat, Beats
from ..run.run_folder import Record, write_atomic

# Maximum number of recent steps in the mean work time that identifies slow ranks.
STEPS_JUDGED = 10
Item = TypeVar("Item")
# Function that returns the seconds of an event on a device's clock, once the device has passed it
# (devices/base.py).
Reading = Callable[[], float]

# values of `name` in Stopwatch.part
PARTS = ("data", "forward", "backward", "pipeline", "optimizer")
COLLECTIVE = re.compile(
    r"gloo:|nccl|c10d::|_c10d_functional|all_?reduce|all_?gather|reduce_?scatter|broadcast|ProcessGroup",
    re.I,
)
MOST = 12  # maximum number of operations in a summary
Span = tuple[float, float]  # begin and end in microseconds


def now() -> Reading:
    """Records the current time on the host's clock."""
    moment = time.perf_counter()
    return lambda: moment


class Stopwatch:
    """Stopwatch that assigns each second since `started` to a stage. `started` is the unix time
    when the user's command began.

    Time in the training loop outside validation and checkpoints counts as training. The heartbeat,
    if there is one, reports the current stage to the watchdog. In logged steps, each part is timed
    on the device's clock (`clock`). The clock is read at logging, when the host waits for the
    device anyway.
    """

    def __init__(
        self,
        started: float,
        heart: Heart | None = None,
        clock: Callable[[], Reading] = now,
        at_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Starts the stopwatch. `at_step` is called at the beginning of every step."""
        self.started, self.heart, self.clock, self.at_step = started, heart, clock, at_step
        self.sampled = False
        self.spans: list[tuple[str, Reading, Reading]] = []  # timed parts of the sampled step
        # times when a backward pass computed its last gradient
        self.computed: list[Reading] = []
        self.position = "load", 0  # phase and step
        # times of this rank's own work in recent steps, without waiting for other ranks
        self.work: deque[list[tuple[Reading, Reading]]] = deque(maxlen=STEPS_JUDGED)
        self.by_blocks = False  # whether blocks are timed one by one
        self.startup = 0.0
        self.to_first_step = 0.0
        # startup milestones, in seconds since the command
        self.reached: dict[str, float] = {}
        self.before = 0.0  # training seconds of earlier attempts that this attempt continues
        self.last_stage = 0.0  # seconds of the latest stage
        self.apart = {"validate": 0.0, "checkpoint": 0.0}

    def start_training(self, before: float) -> None:
        self.startup, self.before = self.total, before
        self.reached["built"] = self.startup

    def begin(self, step: int, sampled: bool = False) -> None:
        """Begins a step; the first step of an attempt may compile."""
        self.at_step(step)
        self.sampled, self.spans = sampled, []
        self.work.append([])
        self._at("step" if self.to_first_step else "compile", step)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Times a forward pass on the device's clock, because the host runs ahead and can't see a
        slow device.

        The pass counts as this rank's own work. If blocks wait for weights of other ranks, only the
        times from `hear_blocks` count instead.
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
        """Counts only the time of blocks as own work, measured after their weights have arrived.

        Call it after FSDP has registered its hooks, because they must run before these.
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
                # hooks must stay outside the compiled code
                register(disable(hook))  # type: ignore[no-untyped-call]

    def _worked(self, began: Reading, ended: Reading) -> None:
        if self.work:
            self.work[-1].append((began, ended))

    def tell(self) -> None:
        """Reports the mean time of this rank's own work in recent steps to the heartbeat. The
        device must have finished these steps.
        """
        seconds = [sum(ended() - began() for began, ended in step) for step in self.work if step]
        self.work.clear()
        if self.heart and seconds:
            self.heart.busy = sum(seconds) / len(seconds)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times its body as a part of a sampled step, and labels it in profiles. Does nothing in
        other steps.
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
        """Registers a hook that records when the last gradient is computed. The rest of the
        backward pass counts as communication.

        `first` must be the model's first module, because the gradient of its output is computed
        last.
        """

        def listen(_: nn.Module, __: object, output: Tensor) -> None:
            if self.sampled and output.requires_grad:
                output.register_hook(lambda gradient: self.computed.append(self.clock()))  # type: ignore[no-untyped-call]

        first.register_forward_hook(listen)

    def fetch(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yields the same batches; the wait for each one counts as `data`."""
        while True:
            with self.part("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def parts(self) -> dict[str, float]:
        """Returns the seconds per part of the step if it was sampled. Waits for the device."""
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
        self.work.clear()  # it includes compilation, which takes a different time on each rank

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time of its body as stage `name` instead of training."""
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
        """Seconds of training in this attempt."""
        return self.total - self.startup - sum(self.apart.values()) if self.startup else 0.0

    @property
    def trained(self) -> float:
        """Seconds of training in all attempts, without the steps that were lost in a crash."""
        return self.before + self.training

    def stages(self) -> dict[str, float]:
        """Returns the seconds per stage of this attempt. The last one, `total`, also includes the
        time after training.
        """
        return {
            "startup": self.startup or self.total,
            "train": self.training,
            **self.apart,
            "total": self.total,
        }


class Slowest:
    """Detector of the rank with the longest own work in recent steps.

    It reads the heartbeats of all ranks (health/heartbeat_format.py), which are at most two seconds
    old.
    """

    def __init__(self, heart: Heart, ranks: int) -> None:
        """Starts to read heartbeats. Requires that `heart` has joined the other ranks, because only
        then is the attempt's number final.
        """
        self.beats, self.ranks = Beats(heart.folder, heart.attempt.number), ranks
        self.known: dict[int, Beat] = {}

    def measure(self) -> Record:
        """Returns the slowest rank, its work time and the median work time. Returns {} until the
        heartbeats of all ranks are visible.

        If nodes do not share the run folder, each node sees only its own ranks.
        """
        self.known |= self.beats.new()
        busy = {rank: beat.busy_seconds for rank, beat in self.known.items() if beat.busy_seconds}
        if len(busy) < max(2, self.ranks):
            return {}
        rank = max(busy, key=busy.__getitem__)
        return {
            "slowest_rank": rank,
            "slowest_own": round(busy[rank], 4),
            "median_own": round(median(busy.values()), 4),
        }


class StepProfiler:
    """Profiler for the steps `first-last` of a rank, if given. It writes trace.json.gz and
    summary.json to a folder.
    """

    def __init__(self, folder: Path, steps: str | None) -> None:
        self.folder = folder
        self.first, self.last = map(int, steps.split("-")) if steps else (0, 0)
        self.profiler: Any = None
        self.began = 0.0

    def at(self, step: int) -> None:
        """Starts or stops the profiler at the beginning of a step."""
        if step == self.first and self.first:
            # profiles all activities that torch supports here, on the host and on devices
            self.profiler, self.began = (profile(), time.perf_counter())
            self.profiler.start()
        elif step == self.last + 1:
            self.close()

    def close(self) -> None:
        """Writes the trace and summary if the profiler is running."""
        if self.profiler is None:
            return
        self.profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(str(self.folder / "trace.json.gz"))
        found = summarize(self.profiler.events())
        write_atomic(
            self.folder / "summary.json",
            json.dumps({"steps": [self.first, self.last]} | found, indent=2) + "\n",
        )
        self.profiler = None


def summarize(events: Iterable[Any]) -> dict[str, Any]:
    """Returns the profiled seconds, the seconds per part, the communication time and the most
    expensive operations.

    If a device did the work, counts its kernels, otherwise the host's operations without their
    callees. Communication is hidden while any computation runs.
    """
    parts = {name: list[Span]() for name in PARTS}
    on_host, on_device = list[Any](), list[Any]()
    for event in events:
        if event.name not in PARTS:
            (on_host if event.device_type == DeviceType.CPU else on_device).append(event)
        elif event.device_type == DeviceType.CPU:
            parts[event.name].append(_span(event))
    work = on_device or on_host
    regions = sum(parts.values(), list[Span]())
    times = [edge for span in regions or map(_span, work) for edge in span]
    total = max(times) - min(times) if times else 0.0
    return {
        "seconds": total / 1e6,
        "parts": {name: length(spans) / 1e6 for name, spans in parts.items() if spans},
        "communication": _communication(work, bool(on_device)),
        "top": _top(work, bool(on_device)),
    }


def _communication(work: list[Any], kernels: bool) -> dict[str, float]:
    talk, own = list[Span](), list[Span]()
    for event in work:
        if COLLECTIVE.search(event.name):
            talk.append(_span(event))
        elif kernels or event.name.startswith("aten::"):
            own.append(_span(event))
    talking, computing = length(merge(talk)), length(merge(own))
    together = talking + computing - length(merge([*talk, *own]))
    return {"seconds": talking / 1e6, "not_hidden": (talking - together) / 1e6}


def merge(spans: Iterable[Span]) -> list[Span]:
    """Merges overlapping spans."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def _top(work: list[Any], kernels: bool) -> list[dict[str, Any]]:
    taken: dict[str, tuple[float, int]] = {}
    for event in work:
        spent = length([_span(event)]) if kernels else event.self_cpu_time_total
        before, calls = taken.get(event.name, (0.0, 0))
        taken[event.name] = before + spent, calls + 1
    longest = sorted(taken.items(), key=lambda item: -item[1][0])[:MOST]
    return [
        {"name": name, "seconds": spent / 1e6, "calls": calls} for name, (spent, calls) in longest
    ]
