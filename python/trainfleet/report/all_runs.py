"""Data for the page that shows all runs (`make watch` without RUN): those in runs/, and those in
the folders and S3 addresses that the config's `watch` lists.

The list reads only the end of each run's files, and caches its results for runs that have ended.
Curves are read when the page requests them, and are thinned.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, islice
from math import isfinite
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from ..config.key import NAME
from ..run import records
from ..run.records import check_metric, size_of, whole_lines
from ..run.run_folder import Record, Run, logs_of
from ..storage import s3, sync_rules
from ..storage.folder_sync import FolderSync
from ..trust import untrusted_input
from ..trust.errors import InputError, TrainfleetError
from ..trust.safe_output import shown
from ..trust.untrusted_input import shortened
from .history import number, quantity, read
from .server import HTML, Query, Routes
from .summary import differences, value_text

PAGE = Path(__file__).with_name("all_runs.html")
ENTRIES = 20_000  # maximum number of entries to scan per folder
LISTED = 2000  # maximum number of runs on the page; the newest are kept
TAIL = 4 * untrusted_input.KIBIBYTE  # bytes to read from the end of metrics.jsonl for a summary
LARGEST = 256 * untrusted_input.MEBIBYTE  # maximum size of metrics.jsonl for curves
POINTS = 1000  # maximum points per curve
KEPT = 14  # maximum number of runs with cached metrics, as many as the page compares
LOGS, LOG_END = 16, 64 * untrusted_input.KIBIBYTE  # maximum number of logs, and bytes per log
NOTE = 300  # maximum characters of a verdict or phase
EVERY = 30.0  # seconds between listings of an S3 address
WHOLE = ("config.yaml", "given.yaml", "results.json", "metrics.jsonl")
FILES = ("results.json", "head.json", "metrics.jsonl", "report.html")
ENDED = ("finished", "failed", "stopped")
CURVES = ("loss", "valid_loss", "lr", "grad_norm", "tokens_per_second")
COLUMNS = (*CURVES, "tokens", "span")
Curve = tuple[Sequence[int], Sequence[float]]  # steps and values
Columns = dict[str, Curve]


class RunsFolder:
    """Folder that contains run folders. `name` is its entry in the config's `watch`, or "" for
    runs/.
    """

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root

    def fault(self) -> str:
        """Returns why the folder can't be read, or ""."""
        return "" if os.access(self.root, os.R_OK | os.X_OK) else "is not a readable folder"

    def whole(self, name: str) -> Run:
        """Returns a run with all files that the page shows."""
        return Run(self.root / name)

    def found(self) -> Iterator[tuple[float, str, Any, RunsFolder]]:
        """Yields a tuple for each run: the time of its last update, its key on the page, its files'
        times and sizes, and this folder.
        """
        with suppress(OSError), os.scandir(self.root) as entries:
            for entry in islice(entries, ENTRIES):
                stamp = [_stamp(f"{entry.path}/{file}") for file in FILES]
                if (stamp[0] or stamp[1]) and not (self.name and entry.is_symlink()):
                    updated = max(filter(None, stamp[:-1]))[0] / 1e9
                    yield updated, f"{self.name}/{entry.name}".lstrip("/"), stamp, self


class RunsBucket(RunsFolder):
    """S3 address that contains run folders. A background thread downloads what the list shows. A
    run's config and full metrics are downloaded when the page requests them.
    """

    def __init__(self, address: str) -> None:
        self.home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        super().__init__(address.rstrip("/"), Path(self.home.name, "list"))
        self.trouble, self.downloading = "is being read", threading.Lock()
        self.due = dict[str, float]()  # run name → monotonic time of its next download
        threading.Thread(target=self._keep, daemon=True).start()

    def fault(self) -> str:
        return self.trouble

    def whole(self, name: str) -> Run:
        run = Run(Path(self.home.name, "whole", name))
        with self.downloading:
            FolderSync(run.folder, f"{self.name}/{name}").pull(WHOLE.__contains__)
        return run

    def _keep(self) -> None:
        while True:
            try:
                for name in s3.list_folders(f"{self.name}/")[-LISTED:]:
                    if re.fullmatch(NAME, name) and self.due.get(name, 0.0) < time.monotonic():
                        self._download(name)
                self.trouble = ""
            except (TrainfleetError, OSError) as error:
                self.trouble = shown(shortened(" ".join(str(error).split()), NOTE))
            time.sleep(EVERY)

    def _download(self, name: str) -> None:
        """Downloads the end of a run's files. Recently updated runs are downloaded more often."""
        run, folder = f"{self.name}/{name}", self.root / name
        FolderSync(folder, run).pull(lambda _: True, "events/")
        for file, most in (("results.json", untrusted_input.RECORD), ("metrics.jsonl", TAIL)):
            for found in s3.list_objects(f"{run}/{file}")[-1:]:
                text = s3.read_range(found.address, max(0, found.size - most), found.size)
                if most == TAIL:  # the first line may be incomplete
                    text = text.partition(b"\n")[2]
                sync_rules.write(folder, file, 0, text, found.modified)
                self.due[name] = time.monotonic() + (time.time() - found.modified) / 20


class AllRuns:
    """Thread-safe handlers for the page's requests."""

    def __init__(self, root: Path, watched: Sequence[str] = ()) -> None:
        self.folders = [RunsFolder("", root)]
        for name in watched:
            path = Path(name).expanduser()
            self.folders += [RunsBucket(name) if name[:5] == s3.SCHEME else RunsFolder(name, path)]
        self.listing, self.reading = threading.Lock(), threading.Lock()
        self.cards = dict[str, tuple[object, Record, RunsFolder]]()
        self.columns = dict[str, tuple[object, Columns]]()

    @property
    def routes(self) -> Routes:
        return {
            "/runs.json": lambda _: _json(self.runs()),
            "/curves.json": lambda query: _json(self.curves(query)),
            "/differences.json": lambda query: _json(self.differences(query)),
            "/report": lambda query: (HTML, report_of(self._runs(query)[0])),
            "/log": lambda query: ("text/plain", log_of(self._runs(query)[0])),
        }

    def runs(self) -> Record:
        """Returns a summary of each run, newest first."""
        with self.listing:
            found = sorted((one for folder in self.folders for one in folder.found()), reverse=True)
            self.cards = {
                key: (stamp, self._card(key, stamp, folder, updated), folder)
                for updated, key, stamp, folder in found[:LISTED]
            }
            cards = [card for _, card, _ in self.cards.values()]
        faults = [f"{shown(one.name)}: {why}" for one in self.folders[1:] if (why := one.fault())]
        return {"now": time.time(), "total": len(found), "runs": cards, "faults": faults}

    def _card(self, key: str, stamp: object, folder: RunsFolder, updated: float) -> Record:
        known = self.cards.get(key)
        if known and known[0] == stamp and known[1]["status"] in ENDED:
            return known[1]
        run = Run(folder.root / Path(key).name)
        card = {
            "id": quote(os.fsencode(key), safe=""),
            "name": shown(run.name),
            "where": shown(folder.name),
            "updated": updated,
            "report": run.report.is_file(),
            "log": run.logs.is_dir() and not run.logs.is_symlink(),
        }
        try:
            return card | summary_of(run)
        except (TrainfleetError, OSError) as error:
            return card | {"status": "unreadable", "note": _why(error, run)}

    def _runs(self, query: Query) -> list[Run]:
        """Returns the listed runs that a request names. Raises FileNotFoundError for other runs."""
        names = query.get("run", ())
        if not names or not all(name in self.cards for name in names):
            raise FileNotFoundError(*names)
        return [self.cards[name][2].whole(Path(name).name) for name in names]

    def curves(self, query: Query) -> Record:
        """Returns a run's curves from step `begin` to step `end`, or why they can't be read."""
        run, *_ = self._runs(query)
        ends = [untrusted_input.whole(query.get(name, [""])[0]) for name in ("begin", "end")]
        try:
            with self.reading:
                columns = self._columns(run)
            usd = number(run.read_results().get("usd"))
        except (TrainfleetError, OSError) as error:
            return {"fault": _why(error, run)}
        found = {name: thinned(*cut(*columns[name], *ends)) for name in CURVES}
        clock = {name: thinned(*columns[name]) for name in ("tokens", "elapsed")}
        return {"usd": usd, **found, **clock}

    def _columns(self, run: Run) -> Columns:
        path = str(run.metrics)
        stamp, known = _stamp(path), self.columns.get(path)
        if known is None or known[0] != stamp:
            known = (stamp, columns_of(run))
            self.columns.pop(path, None)
            for oldest in list(self.columns)[: len(self.columns) - KEPT + 1]:
                del self.columns[oldest]
            self.columns[path] = known
        return known[1]

    def differences(self, query: Query) -> Record:
        """Returns the config keys in which runs differ, each with one value per run."""
        runs = self._runs(query)
        try:
            found = differences(runs)
        except (TrainfleetError, OSError) as error:
            return {"fault": _why(error, runs[0])}
        return {"keys": {key: [*map(value_text, values)] for key, values in found.items()}}


def summary_of(run: Run) -> Record:
    """Returns a run's row on the page. Raises TrainfleetError if the run can't be read."""
    history = read(run, TAIL)
    results, model = history.results, history.results.get("model") or {}
    size = model.get("parameters")
    return {
        "status": history.status,
        "note": shown(shortened(history.verdict[0] if history.verdict else history.phase, NOTE)),
        "step": history.step,
        "steps": results.get("total_steps") or results.get("steps"),
        "loss": None if history.is_lost else history.losses[1],
        **{name: history.measured(name) for name in ("valid_loss", "tokens_per_second", "tokens")},
        "usd": number(results.get("usd")),
        "nodes": results.get("nodes"),
        "model": shown(
            shortened(f"{model.get('family', '')} {quantity(size) if size else ''}".strip())
        ),
    }


def columns_of(run: Run) -> Columns:
    """Returns the steps and the finite values of each metric, and the training time so far.

    If a step was repeated, its latest values are kept. Invalid lines are skipped. Raises InputError
    if no line is valid, or metrics.jsonl has more than LARGEST bytes.
    """
    if size_of(run.metrics) > LARGEST:
        what = f"is larger than {LARGEST // untrusted_input.MEBIBYTE} MiB; see the report instead"
        raise InputError(what, where=str(run.metrics))
    rows = {line["step"]: tuple(map(line.get, COLUMNS)) for line in _lines(run)}
    if not rows and size_of(run.metrics):
        raise InputError("has no valid metrics", where=str(run.metrics))
    steps = sorted(rows)
    columns = zip(*(rows[step] for step in steps), strict=True)
    found: Columns = dict.fromkeys(COLUMNS, ([], []))
    found |= {name: _finite(steps, column) for name, column in zip(COLUMNS, columns, strict=False)}
    at, spans = found["span"]
    return found | {"elapsed": (at, array("d", accumulate(spans)))}


def _lines(run: Run) -> Iterator[Record]:
    """Yields the valid records of metrics.jsonl. Parses many lines at once, which takes a third of
    the time.
    """
    rest = b""
    with suppress(FileNotFoundError), untrusted_input.open_regular(run.metrics) as stream:
        while block := stream.read(untrusted_input.LINE):
            lines, _, rest = (rest + block).rpartition(b"\n")
            rest = rest if len(rest) <= untrusted_input.LINE else b""
            try:
                found = json.loads(b"[%s]" % lines.replace(b"\n", b","))
            except (ValueError, RecursionError):
                found = [*map(_record, lines.splitlines())]
            yield from (line for line in found if isinstance(line, dict) and _has_step(line))


def _has_step(line: Record) -> bool:
    return type(step := line.get("step")) is int and 0 <= step <= records.LAST_STEP


def _record(line: bytes) -> Record | None:
    with suppress(InputError):
        return check_metric(untrusted_input.parse_line(line, ""))
    return None


def _finite(steps: list[int], values: Sequence[Any]) -> Curve:
    """Returns the finite values and their steps."""
    with suppress(TypeError, OverflowError):  # fast path: if the sum is finite, so are all values
        if isfinite(sum(values)):
            return steps, array("d", values)
    kept = [pair for pair in zip(steps, values, strict=True) if isinstance(pair[1], (int, float))]
    whole = [pair for pair in kept if -records.LARGEST <= pair[1] <= records.LARGEST]
    return [step for step, _ in whole], array("d", [value for _, value in whole])


def cut(steps: Sequence[int], values: Sequence[float], begin: int | None, end: int | None) -> Curve:
    """Returns the points between two steps, and one more on each side."""
    first = 0 if begin is None else max(0, bisect_left(steps, begin) - 1)
    last = len(steps) if end is None else bisect_right(steps, end) + 1
    return steps[first:last], values[first:last]


def thinned(steps: Sequence[int], values: Sequence[float]) -> Curve:
    """Returns at most POINTS points of a curve: its ends, and the minimum and the maximum of each
    bucket.
    """
    chosen: Sequence[int] = range(len(steps))
    if len(steps) > POINTS:
        buckets = POINTS // 2 - 1
        kept = {0, len(steps) - 1}
        for bucket in range(buckets):
            first = bucket * len(steps) // buckets
            part = values[first : (bucket + 1) * len(steps) // buckets]
            kept |= {first + part.index(min(part)), first + part.index(max(part))}
        chosen = sorted(kept)
    return [steps[at] for at in chosen], [float(f"{values[at]:.7g}") for at in chosen]


def report_of(run: Run) -> bytes:
    """Returns report.html. Raises FileNotFoundError if it does not exist."""
    return untrusted_input.read_bytes(run.report, 4 * untrusted_input.RECORD)


def log_of(run: Run) -> bytes:
    """Returns the end of each node's log."""
    parts = []
    for log in logs_of(run)[:LOGS]:
        try:
            lines, _ = whole_lines(log, max(0, size_of(log) - LOG_END))
        except InputError as error:
            lines = [str(error).encode()]
        words = (line.decode(errors="replace") for line in lines)
        parts.append("\n".join([f"== the end of {log.name} ==", *words, ""]))
    return shown("\n".join(parts) or "this run has no log yet\n").encode()


def page() -> bytes:
    """Returns the page. Its Content-Security-Policy allows only its own script."""
    script = PAGE.with_suffix(".js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = Template(PAGE.read_text(encoding="utf-8"))
    return text.substitute(script=script, hash=f"sha256-{digest}").encode()


def _why(error: Exception, run: Run) -> str:
    """Formats an error as one line, with paths relative to the folder of runs."""
    return shown(str(error).partition("\n")[0].replace(f"{run.folder.parent}/", ""))


def _stamp(path: str) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.lstat(path)
        return found.st_mtime_ns, found.st_size
    return None


def _json(record: Record) -> tuple[str, bytes]:
    return "application/json", json.dumps(record, allow_nan=False).encode()
