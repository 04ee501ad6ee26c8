"""The provenance of a run: versions, devices, the keys that its config sets; and the state of its
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from ..health import fence
from ..health.heartbeat_format import read_beats, stage
from ..run.run_folder import Run
from ..trust import untrusted_input
from ..trust.errors import ConfigError, InputError
from .history import History, duration, layout, moment

SHOWN_RANKS = 8
SHOWN_KEYS = 40


def facts(history: History) -> Iterator[tuple[str, str]]:
    """Yields the facts needed to repeat the run."""
    results = history.results
    versions = results.get("versions") or {}
    if versions:
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if device := results.get("device_name") or results.get("device"):
        yield "device", ", ".join(filter(None, (device, results.get("precision"))))
    if degrees := results.get("layout"):
        yield "layout", layout(degrees)
    launched = [event for event in history.events if event["event"] == "launched"]
    if history.started:
        yield "first start", f"{moment(history.started)} UTC"
    if len(launched) > 1:
        times = "once," if len(launched) == 2 else f"{len(launched) - 1} times, last"
        yield "started again", f"{times} {moment(launched[-1]['time'])} UTC"
    causes = [str(event.get("cause")) for event in history.events if event["event"] == "restarted"]
    yield "restarts", ": ".join(filter(None, (str(len(causes)), ", ".join(causes))))


def ranks(history: History) -> Iterator[tuple[str, ...]]:
    """Yields the ranks by their own work in the newest step, without waiting for others; none
    without heartbeats.
    """
    if history.status != "running":
        return
    with suppress(OSError, InputError):
        beats = read_beats(history.run.folder, fence.current(history.run.folder).order)
        for beat in islice(
            sorted(beats.values(), key=lambda beat: -beat.busy_seconds), SHOWN_RANKS
        ):
            spent = f"{duration(beat.busy_seconds)} of {duration(beat.step_seconds)}"
            yield f"rank {beat.rank}", f"node {beat.node}", stage(beat), spent


def given(run: Run) -> Iterator[tuple[str, str]]:
    """Yields the keys with other values than their defaults."""
    from ..config import yaml_lines
    from ..config.schema import load_schema

    if not run.given.exists():
        return
    with suppress(InputError, ConfigError):
        found = yaml_lines.read(
            untrusted_input.read_text(run.given, untrusted_input.RECORD), str(run.given)
        )
        yield from islice(_changed(found.value, load_schema()), SHOWN_KEYS)


def _changed(values: Any, schema: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items() if isinstance(values, dict) else ():
        inner = schema.get("properties", {}).get(key, {})
        if isinstance(value, dict):
            yield from _changed(value, inner, f"{prefix}{key}.")
        elif value != inner.get("default") and value not in ([], None):
            yield f"{prefix}{key}", str(value)
