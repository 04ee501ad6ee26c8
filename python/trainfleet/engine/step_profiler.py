"""Runs torch's profiler on chosen steps: the trace for a viewer, and a summary of the time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import profile

from ..run.run_folder import write_atomic

PARTS = ("data", "forward", "backward", "pipeline", "optimizer")  # names in Stopwatch.part
COLLECTIVE = re.compile(
    r"gloo:|nccl|c10d::|_c10d_functional|all_?reduce|all_?gather|reduce_?scatter|broadcast|ProcessGroup",
    re.I,
)
MOST = 12  # operations in a summary
Span = tuple[float, float]  # begin and end, in microseconds


class StepProfiler:
    """Profiles the steps `first-last` of a rank, or none, and leaves trace.json.gz and summary.json
    in a folder.
    """

    def __init__(self, folder: Path, steps: str | None) -> None:
        self.folder = folder
        self.first, self.last = map(int, steps.split("-")) if steps else (0, 0)
        self.profiler: Any = None
        self.began = 0.0

    def at(self, step: int) -> None:
        """Starts or ends the profile when a step begins."""
        if step == self.first and self.first:
            # everything that torch can see here: the host, and devices
            self.profiler, self.began = (profile(), time.perf_counter())
            self.profiler.start()
        elif step == self.last + 1:
            self.close()

    def close(self) -> None:
        """Writes the trace and the summary, if a step was profiled."""
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
    """Returns seconds of the profiled time and of its parts, the collectives' share, and the
    operations that took longest.

    If a device did the work, its kernels count; otherwise the host's operations, each without those
    that it called. A collective is hidden while anything else is computed.
    """
    events = list(events)
    regions = [
        event for event in events if event.name in PARTS and event.device_type == DeviceType.CPU
    ]
    kernels = [
        event for event in events if event.device_type != DeviceType.CPU and event.name not in PARTS
    ]
    work = kernels or [event for event in events if event.name not in PARTS]
    talk = [event for event in work if COLLECTIVE.search(event.name)]
    own = [
        event
        for event in work
        if not COLLECTIVE.search(event.name) and (kernels or event.name.startswith("aten::"))
    ]
    times = [edge for event in regions or work for edge in _span(event)]
    total = (max(times) - min(times)) if times else 0.0
    talking, computing = merge(map(_span, talk)), merge(map(_span, own))
    together = length(talking) + length(computing) - length(merge([*talking, *computing]))
    return {
        "seconds": total / 1e6,
        "parts": {
            name: length(_span(event) for event in regions if event.name == name) / 1e6
            for name in PARTS
            if any(event.name == name for event in regions)
        },
        "communication": {
            "seconds": length(talking) / 1e6,
            "not_hidden": (length(talking) - together) / 1e6,
        },
        "top": _top(work, bool(kernels)),
    }


def merge(spans: Iterable[Span]) -> list[Span]:
    """Returns the same time as spans that don't overlap."""
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
