"""Parsers for the output of Neuron's tools: neuron-monitor, neuron-ls and nccom-test.

The formats are from awsdocs-neuron.readthedocs-hosted.com, tools/neuron-sys-tools, SDK 2.32
(2026-08-21). A group that is missing or null in a report counts as empty. A group of any other
shape raises InputError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, TypeVar

from ..trust import untrusted_input
from ..trust.errors import InputError
from ..trust.validation import Count, Name, Range, fit

Percent = Annotated[float, Range(0, 100.5)]
Seconds = Annotated[float, Range(0, 1e6)]
GIB = 2**30
WHERE = "neuron-monitor"
T = TypeVar("T")
Record = dict[str, Any]
Counts = dict[str, Count]


class _Core(TypedDict, total=False):
    neuroncore_utilization: Percent | None


class _Latency(TypedDict, total=False):
    p50: Seconds | None


class _Bytes(TypedDict, total=False):
    neuron_device: Count | None


class _Hardware(TypedDict, total=False):
    neuron_devices: list[Counts] | None


class _Monitor(TypedDict, total=False):
    neuron_runtime_data: list[Record] | None
    system_data: Record | None


@dataclass(frozen=True)
class Reading:
    """neuron-monitor report about all processes of a node in one period.

    utilization   mean percentage over the cores in use; None if no core is in use
    memory        bytes used on the devices
    corrected, uncorrected   memory errors since the driver was loaded, on and off the chip
    errors        executions that failed in the period, including timeouts of collectives
    latency       median execution time on the device in seconds, of the slowest process; None if no
                  process ran
    """

    cores: int = 0
    utilization: float | None = None
    memory: int = 0
    corrected: int = 0
    uncorrected: int = 0
    errors: int = 0
    timed_out: int = 0
    latency: float | None = None

    def metrics(self) -> dict[str, float]:
        """Returns the reading's fields for a metrics line."""
        figures = {"core_utilization": self.utilization, "execution_seconds": self.latency}
        counts = {
            "device_bytes": self.memory,
            "ecc_corrected": self.corrected,
            "ecc_uncorrected": self.uncorrected,
            "execution_errors": self.errors,
            "execution_timeouts": self.timed_out,
        }
        return counts | {
            name: round(value, 6) for name, value in figures.items() if value is not None
        }


def read_monitor(line: bytes) -> Reading:
    """Parses one line of neuron-monitor output.

    Raises:
        InputError: the line is not a report.
    """
    monitor = fit(_Monitor, untrusted_input.parse_line(line, WHERE), WHERE)
    reports = _groups(Record, monitor.get("neuron_runtime_data") or [], "report")
    used = _utilizations(reports)
    memory = _groups(_Bytes, reports, "memory_used", "neuron_runtime_used_bytes")
    runs = _groups(Record, reports, "execution_stats")
    errors = _groups(Counts, runs, "error_summary")
    timed_out = _sum(_groups(Counts, runs, "execution_summary"), "timed_out")
    latencies = _groups(_Latency, runs, "latency_stats", "device_latency")
    times = [time for latency in latencies if (time := latency.get("p50")) is not None]
    devices = _devices(monitor)
    return Reading(
        cores=len(used),
        utilization=sum(used) / len(used) if used else None,
        memory=sum(one.get("neuron_device") or 0 for one in memory),
        corrected=_sum(devices, "mem_ecc_corrected", "sram_ecc_corrected"),
        uncorrected=_sum(devices, "mem_ecc_uncorrected", "sram_ecc_uncorrected"),
        errors=sum(sum(one.values()) for one in errors) + timed_out,
        timed_out=timed_out,
        latency=max(times, default=None),
    )


def _utilizations(reports: list[Record]) -> list[float]:
    """Returns the percentage of each core in use."""
    cores = _groups(dict[str, _Core], reports, "neuroncore_counters", "neuroncores_in_use")
    return [core.get("neuroncore_utilization") or 0.0 for each in cores for core in each.values()]


def _devices(monitor: _Monitor) -> list[Counts]:
    """Returns the hardware counters of each device."""
    [hardware] = _groups(_Hardware, [monitor], "system_data", "neuron_hw_counters")
    return hardware.get("neuron_devices") or []


def _groups(kind: type[T], records: Iterable[Mapping[str, Any]], *names: str) -> list[T]:
    """Returns each record's group at a path, which is empty if the group is missing or null."""
    for name in names:
        records = [
            {} if (found := fit(Record, record).get(name)) is None else found for record in records
        ]
    return [fit(kind, record) for record in records]


def _sum(records: Iterable[dict[str, int]], *names: str) -> int:
    return sum(record.get(name, 0) for record in records for name in names)


class _Process(TypedDict, total=False):
    pid: Count
    command: Name


class _Device(TypedDict, total=False):
    neuron_device: Count
    nc_count: Count
    memory_size: Count
    neuron_processes: list[_Process] | None


@dataclass(frozen=True)
class NeuronDevice:
    """Neuron device, as listed by neuron-ls.

    `cores` counts logical cores, `memory` is in bytes, and each user is `pid command`.
    """

    number: int
    cores: int
    memory: int
    users: tuple[str, ...] = ()


def read_devices(text: str) -> tuple[NeuronDevice, ...]:
    """Parses the output of `neuron-ls --json-output`.

    Raises:
        InputError: the text is not a list of devices.
    """
    listed = fit(list[_Device], untrusted_input.parse_json(text, "neuron-ls"), "neuron-ls")
    return tuple(sorted(map(_device, listed), key=lambda device: device.number))


def _device(listed: _Device) -> NeuronDevice:
    users = tuple(
        f"{user.get('pid', '?')} {user.get('command', '')}".strip()
        for user in listed.get("neuron_processes") or []
    )
    return NeuronDevice(
        listed.get("neuron_device", -1),
        listed.get("nc_count", 0),
        listed.get("memory_size", 0),
        users,
    )


@dataclass(frozen=True)
class Collective:
    """One row of nccom-test output: message size, time, and bus bandwidth in GB/s (10^9 bytes per
    second).
    """

    bytes: int
    microseconds: float
    gbs: float


NUMBER = r"(\d{1,12}(?:\.\d{1,6})?)"
ROW = re.compile(
    rf"\s*(\d{{1,15}})\s+\d{{1,15}}\s+[a-z][a-z0-9]{{1,7}}\s+{NUMBER}\s+{NUMBER}\s+{NUMBER}"
)


def read_collectives(lines: Iterable[str]) -> list[Collective]:
    """Parses nccom-test's table and converts bandwidths from GiB/s to GB/s.

    Raises:
        InputError: there are no rows. The message quotes the last line of the output.
    """
    lines = list(lines)
    if rows := list(_rows(lines)):
        return rows
    said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    raise InputError(f"printed {untrusted_input.show(said)}", where="nccom-test")


def _rows(lines: Iterable[str]) -> Iterator[Collective]:
    for line in lines:
        if row := ROW.match(line[:400]):
            yield Collective(int(row[1]), float(row[2]), float(row[4]) * GIB / 1e9)
