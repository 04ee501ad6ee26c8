"""Per-stage step timing, straggler detection, and a profiler for selected steps."""

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

# number of recent steps over which work time is averaged to find stragglers
STEPS_JUDGED = 10
Item = TypeVar("Item")
# Event on the device clock. The difference of two events is in seconds. Subtract them only after
# the device has passed both (devices/base.py).
Reading = Any

# valid names for Stopwatch.part
PARTS = ("data", "forward", "backward", "pipeline", "optimizer")
COLLECTIVE = re.compile(
    r"gloo:|nccl|c10d::|_c10d_functional|all_?reduce|all_?gather|reduce_?scatter|broadcast|ProcessGroup",
    re.I,
)
# Kinds of operations to total in a profile, for use by later plans. Patterns match torch's op names
# on the host, and the kernel names of cuBLAS, CUTLASS, cuDNN and FlashAttention. The first match
# wins.
KINDS = {
    "attention": re.compile(r"flash|fmha|sdpa|attention", re.I),
    "products": re.compile(r"gemm|cutlass|nvjet|xmma|mkldnn_linear|aten::(add|badd)?b?mm", re.I),
}
MOST = 12  # maximum number of operations in a summary
Span = tuple[float, float]  # start and end in microseconds


class Stopwatch:
    """Assigns each second of a run to a stage.

    `started` is the Unix time when the user's command started. Time in the training loop counts as
    training, except for validation and checkpoints. If a heartbeat is given, it reports the current
    stage to the watchdog.

    In logged steps, each part is also timed on the device clock (`clock`). The times are read only
    when metrics are logged, because the host waits for the device at that point anyway.
    """

    def __init__(
        self,
        started: float,
        heart: Heart | None = None,
        clock: Callable[[], Reading] = time.perf_counter,
        at_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Starts the stopwatch. `at_step` is called at the start of every step."""
        self.started = started
        self.heart = heart
        self.clock = clock
        self.at_step = at_step
        self.sampled = False
        self.spans: list[tuple[str, Reading, Reading]] = []  # timed parts of the sampled step
        # when each backward pass computed its last gradient
        self.computed: list[Reading] = []
        self.position = "load", 0  # heartbeat phase and step
        # time spans of this rank's own work in recent steps, excluding waits for other ranks
        self.work: deque[list[tuple[Reading, Reading]]] = deque(maxlen=STEPS_JUDGED)
        self.by_blocks = False  # whether blocks are timed individually
        self.startup = 0.0
        self.to_first_step = 0.0
        # startup milestones, in seconds since the command started
        self.reached: dict[str, float] = {}
        self.before = 0.0  # training seconds of earlier attempts
        self.last_stage = 0.0  # duration of the latest stage in seconds
        self.apart = {"validate": 0.0, "checkpoint": 0.0}

    def start_training(self, before: float) -> None:
        self.startup = self.total
        self.before = before
        self.reached["built"] = self.startup

    def begin(self, step: int, sampled: bool = False) -> None:
        """Marks the start of a step. An attempt's first step counts as compilation."""
        self.at_step(step)
        self.sampled = sampled
        self.spans = []
        self.work.append([])
        self._at("step" if self.to_first_step else "compile", step)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Times a forward pass on the device clock and counts it as this rank's own work.

        The host clock can't reveal a slow device, because the host runs ahead. If blocks wait for
        weights from other ranks, only the times from `hear_blocks` count.
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
        """Counts only the computation in the blocks as own work, once their weights have arrived.

        Call this after FSDP has registered its hooks, because those must run first.
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
                # keep the hooks out of compiled code
                register(disable(hook))  # type: ignore[no-untyped-call]

    def _worked(self, began: Reading, ended: Reading) -> None:
        if self.work:
            self.work[-1].append((began, ended))

    def tell(self) -> None:
        """Reports the mean own-work time of recent steps through the heartbeat.

        The device must have finished these steps.
        """
        seconds = [sum(ended - began for began, ended in step) for step in self.work if step]
        self.work.clear()
        if self.heart and seconds:
            self.heart.busy = sum(seconds) / len(seconds)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times the `with` block as part `name` of a sampled step, and labels it in profiles.

        Does nothing in other steps.
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
        """Counts the time after a backward pass's last gradient as communication.

        Registers a hook on `first`, which must be the model's first module, because its output's
        gradient is computed last.
        """

        def listen(_: nn.Module, __: object, output: Tensor) -> None:
            if self.sampled and output.requires_grad:
                output.register_hook(lambda gradient: self.computed.append(self.clock()))  # type: ignore[no-untyped-call]

        first.register_forward_hook(listen)

    def fetch(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yields the same values as `batches`, counting the wait for each one as `data`."""
        while True:
            with self.part("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def parts(self) -> dict[str, float]:
        """Returns the seconds per part of the latest step, or {} if it was not sampled.

        Waits for the device.
        """
        found: dict[str, float] = {}
        for name, began, ended in self.spans:
            found[name] = found.get(name, 0.0) + (ended - began)
        return found

    def _at(self, phase: str, step: int) -> None:
        self.position = phase, step
        if self.heart:
            self.heart.at(phase, step)

    def first_step(self) -> None:
        self.to_first_step = self.reached["first_step"] = self.total
        self.work.clear()  # exclude compilation, because its duration differs between ranks

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the `with` block as stage `name` instead of as training."""
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
        """Training time of this attempt, in seconds."""
        return self.total - self.startup - sum(self.apart.values()) if self.startup else 0.0

    @property
    def trained(self) -> float:
        """Training time of all attempts, in seconds, excluding steps lost to crashes."""
        return self.before + self.training

    def stages(self) -> dict[str, float]:
        """Returns the seconds per stage of this attempt.

        `total` also includes the time after training.
        """
        return {
            "startup": self.startup or self.total,
            "train": self.training,
            **self.apart,
            "total": self.total,
        }


class Slowest:
    """Straggler detector: finds the rank with the most own-work time in recent steps.

    Reads all ranks' heartbeats (health/heartbeat_format.py), which are at most two seconds old.
    """

    def __init__(self, heart: Heart, ranks: int) -> None:
        """Starts reading heartbeats.

        `heart` must already have joined the other ranks, because the attempt number may change
        until then.
        """
        self.beats = Beats(heart.folder, heart.attempt.number)
        self.ranks = ranks
        self.known: dict[int, Beat] = {}

    def measure(self) -> Record:
        """Returns the slowest rank, its own-work time and the median own-work time, in seconds.

        Returns {} until the heartbeats of all ranks are visible. If nodes do not share the run
        folder, each node sees only its own ranks.
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
    """Profiles a range of steps and writes trace.json.gz and summary.json to a folder.

    `steps` has the form `first-last`, and None disables the profiler.
    """

    def __init__(self, folder: Path, steps: str | None) -> None:
        self.folder = folder
        self.first, self.last = map(int, steps.split("-")) if steps else (0, 0)
        self.profiler: Any = None
        self.began = 0.0

    def at(self, step: int) -> None:
        """Starts or stops the profiler at the beginning of a step."""
        if step == self.first and self.first:
            # all activities that torch supports on this machine, on host and devices
            self.profiler = profile()
            self.began = time.perf_counter()
            self.profiler.start()
        elif step == self.last + 1:
            self.close()

    def close(self) -> None:
        """Writes the trace and summary if the profiler is active."""
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
    """Summarizes a profile: total time, time per part, communication, and the most expensive ops.

    Uses device kernels if there are any, otherwise the host ops' self time. Communication that
    overlaps any compute counts as hidden.
    """
    events, parts = list(events), {name: list[Span]() for name in PARTS}
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
        "kinds": _kinds(events, work, bool(on_device)),
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


def _kinds(events: list[Any], work: list[Any], kernels: bool) -> dict[str, float]:
    """Returns the seconds spent on each of KINDS, excluding optimizer updates."""
    updates = [event for event in events if event.name == "optimizer"]
    there = [event for event in updates if event.device_type != DeviceType.CPU]
    spans = [_span(event) for event in (kernels and there) or updates]
    found = dict.fromkeys(KINDS, 0.0)
    for event in work:
        kind = next((kind for kind, names in KINDS.items() if names.search(event.name)), None)
        if kind and not any(begin <= event.time_range.start <= end for begin, end in spans):
            found[kind] += _spent(event, kernels) / 1e6
    return found


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


def _spent(event: Any, kernels: bool) -> float:
    """Returns an operation's self time in microseconds."""
    return length([_span(event)]) if kernels else float(event.self_cpu_time_total)


def _top(work: list[Any], kernels: bool) -> list[dict[str, Any]]:
    taken: dict[str, tuple[float, int]] = {}
    for event in work:
        before, calls = taken.get(event.name, (0.0, 0))
        taken[event.name] = before + _spent(event, kernels), calls + 1
    longest = sorted(taken.items(), key=lambda item: -item[1][0])[:MOST]
    return [
        {"name": name, "seconds": spent / 1e6, "calls": calls} for name, (spent, calls) in longest
    ]
