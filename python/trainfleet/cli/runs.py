"""Verbs for runs: state, comparison, logs, failure causes and reports."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..run.records import whole_lines
from ..run.run_folder import RUNS, Run, logs_of
from ..trust.errors import BackendError, ConfigError, Problem, RunError, tell
from ..trust.spelling import suggest
from .variables import Variables, flag, number

if TYPE_CHECKING:
    from ..backends.run_storage import Place
    from ..report.server import Routes, Server
    from ..watch.lines import LogLine


def runs(variables: Variables, started: float) -> int:
    """Lists the runs on this machine, or those of CONFIG, with state, step, loss, throughput, cost
    and age.
    """
    from ..launch import cleaning
    from ..launch.command import run_named
    from ..report import json_output, summary

    found = summary.known()
    if {*variables} - {"JSON"}:
        made = cleaning.made_by(run_named(variables), None)
        found = [run for run in found if run.folder in made]
    if flag(variables, "JSON"):
        json_output.emit(json_output.RunsOutput(tuple(map(json_output.state_of, found))))
        return 0
    if not found:
        print(f"no runs {'of this config ' if variables else ''}here yet\nnext: make train")
        return 0
    print("\n".join(summary.describe_runs(found)))
    print(
        "\nnext: make status RUN=name, make logs RUN=name, make compare RUNS='one another', make "
        "clean RUN=name PURGE=1"
    )
    return 0


def watch(variables: Variables, started: float) -> int:
    """Serves the page of all runs, or with RUN, CONFIG or SET the report of one run, which it keeps
    up to date. Ctrl-C stops the server, not the runs.
    """
    from ..launch.command import run_named
    from ..launch.run_location import place_of
    from ..report import all_runs

    port = number(variables, "PORT", 0)
    if port > 65535:
        message = f"must be a port number up to 65535, not {port}"
        raise ConfigError.of("PORT", message, next="set PORT=8642, or omit it")
    if not {*variables} - {"PORT"}:
        return _watch_all(port)
    run = run_named(variables)
    if not run.config.exists():
        raise RunError("was never started", where=str(run.folder), next="make train")
    with place_of(variables) as place:
        _draw(run, place)
        server = served(port, lambda: all_runs.report_of(run))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"{run.name}: {server.link}\nCtrl-C stops this server, not the run")
        try:
            while True:
                time.sleep(max(10.0, place.pace))
                _draw(run, place)
        except KeyboardInterrupt:
            print()
        finally:
            server.shutdown()
    return 0


def _watch_all(port: int) -> int:
    """Serves the page of all runs until Ctrl-C."""
    from ..report import all_runs

    pages = all_runs.AllRuns(RUNS, _watched())
    server = served(port, all_runs.page, pages.routes)
    # Load the list in the background, so that it is ready when the user opens the page.
    threading.Thread(target=pages.runs, daemon=True).start()
    with suppress(KeyboardInterrupt):
        print(f"all runs: {server.link}\nCtrl-C stops this server, not the runs")
        server.serve_forever()
    return 0


def _watched() -> Sequence[str]:
    """Returns the `watch` entries of config.yaml. Prints the error if the file is invalid."""
    from ..launch.command import config_of, settings_of

    settings = settings_of({})
    if not settings.path.exists():
        return ()
    try:
        return config_of(settings)[0].watch
    except ConfigError as error:
        tell(error)
        return ()


def served(port: int, page: Callable[[], bytes], routes: Routes | None = None) -> Server:
    """Returns a server for a page and its routes, listening on `port`.

    If `port` is 0, uses the default port or any free one. Raises ConfigError if the port can't be
    used.
    """
    from ..report.server import Server

    try:
        return Server(page, port or None, routes)
    except OSError as error:
        message = f"{port} can't be used: {error.strerror}"
        raise ConfigError.of(
            "PORT", message, next="set another PORT, or omit it to use any free port"
        ) from error


def _draw(run: Run, place: Place) -> None:
    """Refreshes the run folder and redraws the report. If the fleet does not respond, shows the
    last known state.
    """
    from ..report import html

    try:
        place.refresh()
    except BackendError as error:
        print(f"showing the last known state: {error}")
    html.write(run)


MOST = 7  # maximum number of runs that remain distinguishable in a plot


def compare(variables: Variables, started: float) -> int:
    """Prints how the runs' configs and results differ, and plots their loss curves together."""
    from ..report import json_output, summary

    runs = runs_of(variables.get("RUNS", ""))
    picture = runs[0].plots / "compare.png"
    summary.draw({run.name: run for run in runs}, picture)
    if flag(variables, "JSON"):
        states = tuple(map(json_output.state_of, runs))
        differences = summary.differences(runs)
        json_output.emit(json_output.CompareOutput(states, differences, str(picture)))
        return 0
    print("\n".join(summary.describe_differences(runs)))
    print(f"\nplot  {picture}\nnext  make report RUN={runs[0].name} draws the page of one run")
    return 0


def runs_of(text: str) -> list[Run]:
    """Returns the runs in RUNS. Raises ConfigError if a run is unknown, or if there are fewer than
    two or more than MOST.
    """
    from ..report import summary

    here = {run.name: run for run in summary.known()}
    names = list(dict.fromkeys(text.replace(",", " ").split()))
    problems = [
        Problem(0, "RUNS", "", f"no run has the name {name!r}{suggest(name, here)}")
        for name in names
        if name not in here
    ]
    if not problems and not 2 <= len(names) <= MOST:
        problems = [
            Problem(0, "RUNS", "", f"must name 2 to {MOST} different runs, not {len(names)}")
        ]
    if problems:
        raise ConfigError(
            problems, next="run make runs to list them, then make compare RUNS='one another'"
        )
    return [here[name] for name in names]


def status(variables: Variables, started: float) -> int:
    """Prints the run's state, and the scheduler's reason why its job is pending.

    If the fleet can't be reached, prints the last known state.
    """
    from ..launch import launching, run_location
    from ..launch.command import run_named
    from ..report import json_output, summary

    run = run_named(variables)
    try:
        with run_location.place_of(variables) as place:
            place.refresh()
            # Skip is_running, because it would query the scheduler that has just failed to respond.
            heard = run_location.heard_now(run, variables)
            led, begun = heard is None or place.is_running(), launching.under_way(place)
            alone = "" if led or begun else run_location.orphan_note(run, variables)
            alone = f"\nthe run is being launched: {begun}" if begun and not led else alone
    except BackendError:
        if run.results.exists() and not flag(variables, "JSON"):
            minutes = (started - run.results.stat().st_mtime) / 60
            print(f"{summary.status(run)}\nthis state is {minutes:.0f} min old")
        raise
    if flag(variables, "JSON"):
        json_output.emit(json_output.StatusOutput(json_output.state_of(run, heard or "")))
        return 0
    print(summary.status(run, heard or "") + alone)
    return 0


def logs(variables: Variables, started: float) -> int:
    """Prints the end of each node's log. With FOLLOW=1, continues until the run ends."""
    from ..launch.command import run_named
    from ..launch.run_location import place_of

    run, follow = run_named(variables), flag(variables, "FOLLOW")
    with place_of(variables) as place:
        trouble = look(place, run)
        if follow and not logs_of(run):
            trouble = await_first(place, run)
        if not (found := logs_of(run)):
            raise trouble or RunError(
                "no logs yet",
                where=str(run.logs),
                why="no node of this run has started",
                next="make train",
            )
        # Print the last 20 lines of each log, within its last 256 KiB.
        ends = {log: print_new(log, max(0, log.stat().st_size - 2**18), 20) for log in found}
        while follow:
            # Check before reading the logs, so that their final lines are not missed.
            alive = place.is_running()
            trouble = look(place, run) or trouble
            ends = {log: print_new(log, ends.get(log, 0)) for log in logs_of(run)}
            if not alive:
                break
            time.sleep(place.pace)
    if trouble:
        tell(trouble)
    return 0


TYPED = "make explain LOG=train.log; use LOG=FOLDER for one log per node, or LOG=- for stdin"


def explain(variables: Variables, started: float) -> int:
    """Identifies why a job failed, from a log of torchrun, Slurm, kubectl or any other launcher."""
    from ..watch.diagnosis import diagnose
    from ..watch.verdict import last_words, of_finding

    lines, nodes = _read(variables.get("LOG", ""))
    if finding := diagnose(lines, nodes=nodes):
        print(of_finding(finding, lines, host=""))
        return 0
    print(
        "no line explains why the job ended; the last lines:",
        *(f"  | {words}" for words in last_words(lines)),
        sep="\n",
    )
    return 1


def _read(name: str) -> tuple[list[LogLine], int]:
    """Returns the log lines and the node count.

    The count is 0 for a single log, because any number of nodes may have written to it.
    """
    from ..watch.lines import read_lines

    if not name:
        raise ConfigError.of("LOG", "must name a log", next=TYPED)
    if name == "-":
        with tempfile.NamedTemporaryFile() as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.flush()
            logs, lines = [Path(file.name)], read_lines(Path(file.name), None)
    else:
        path = Path(name)
        if (path / "logs").is_dir():  # a run folder
            path /= "logs"
        logs = sorted(filter(Path.is_file, path.iterdir())) if path.is_dir() else [path]
        several = len(logs) > 1
        lines = [
            line
            for node, log in enumerate(logs)
            for line in read_lines(log, node if several else None, logs=len(logs))
        ]
    if not lines or any("\0" in line.text for line in lines[:100]):
        raise RunError(
            "is not a log; it is missing or has no lines of text", where=name, next=TYPED
        )
    return lines, len(logs) if len(logs) > 1 else 0


def stop(variables: Variables, started: float) -> int:
    """Asks the launcher for a clean stop, no matter which machine it runs on. Waits until all
    processes have exited.
    """
    from ..launch import launching, run_location
    from ..launch.command import run_named

    run = run_named(variables)
    with run_location.place_of(variables) as place:
        place.refresh()
        led = place.is_running()
        if not led and (begun := launching.under_way(place)):
            if launching.cancel(place, run, begun):
                run_location.end(variables)
                print(
                    f"the launch of {run.name} was canceled; no process is running\n"
                    "next: run make train to start again"
                )
                return 0
            led = True
        if not led and not (alone := run_location.nodes_at_work(variables)):
            print(f"{run.name} is not running{place.words}; nothing to stop")
            return 0
        if not led:
            print(f"its launcher is gone, but {', '.join(alone)} are still running")
        calmly = run_location.stop(place, run, variables)
        if not calmly:
            print(f"no answer for {run_location.PATIENCE:.0f} s; killing its processes now")
            run_location.end(variables)
            place.refresh()
            run_location.require_over(run)
    print(_ended(run, calmly))
    return 0


def _ended(run: Run, calmly: bool) -> str:
    """Returns the run's outcome and the next command."""
    if run.read_results().get("status") == "finished":
        return f"{run.name} finished before it could stop; no process is running\nnext: make report"
    return (
        "stopped; no process is running\nnext: make train "
        f"{'resumes it' if calmly else 'resumes from the last checkpoint'}"
    )


def report(variables: Variables, started: float) -> int:
    """Redraws the plots and report.html from the run folder."""
    from ..launch.command import run_named
    from ..report import html, plots

    run = run_named(variables)
    if not run.metrics.exists():
        raise RunError(
            "nothing to report yet",
            where=str(run.folder),
            why="no step has been logged",
            next="make train",
        )
    drawn = plots.draw(run)
    print("\n".join(str(path) for path in (*drawn, html.write(run))))
    return 0


def look(place: Place, run: Run) -> BackendError | None:
    """Fetches new log lines, including those that only the scheduler has.

    Returns an error if the scheduler's lines can't be read.
    """
    place.refresh()
    try:
        place.supplement(run.folder)
    except BackendError as error:
        return error
    return None


def await_first(place: Place, run: Run) -> BackendError | None:
    """Waits for a starting run's first log. Returns an error if the last fetch failed."""
    trouble = None
    while place.is_running() and not logs_of(run):
        time.sleep(place.pace)
        trouble = look(place, run)
    return trouble


def print_new(log: Path, end: int, most: int = 0) -> int:
    """Prints the complete lines after offset `end`, or only the last `most` of them if `most` is
    set.

    Returns the new offset.
    """
    lines, end = whole_lines(log, end)
    for line in lines[-most:]:
        print(f"{log.stem}  {line.decode(errors='replace')}")
    return end
