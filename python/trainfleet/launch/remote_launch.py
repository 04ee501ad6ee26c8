"""Launches a run on a fleet's head: hands the exact requests over to the head, then follows the run
from this machine.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FrameType
from typing import Self

from ..backends import backend_of
from ..backends.base import Backend, Can
from ..backends.head import Head, Hosts
from ..backends.node_script import values_of
from ..checkpoints import marker
from ..config import Config, dump_resolved, load_resolved
from ..health import faults
from ..health.lease import TO_BEGIN, Vacancy, newest_holder, newest_standby, read_holder
from ..hosts.head import Launcher
from ..hosts.host_results import Host, by_host, grouped, names
from ..hosts.preflight import PreflightReport, examine
from ..plan.estimate import PAID, Bill
from ..plan.plan import Plan
from ..process.processes import SIGNALS
from ..report import html
from ..report.summary import print_summary
from ..run import records, run_folder
from ..run.run_folder import Run
from ..trust.errors import BackendError, ConfigError, RunError
from ..watch.budget import Budget
from ..watch.monitor import ENDS
from . import execution
from .launching import is_cancelled, leads

# Environment variable with the command's start time in unix seconds (cli/).
STARTED = "TRAINFLEET_STARTED"
LOOK_EVERY = 1.0  # seconds between polls
SILENCE = 60.0  # maximum seconds without a response from any host
# Config keys excluded from comparison, because the head uses other addresses for the hosts.
OF_THIS_MACHINE = ("fleet.hosts", "fleet.ssh.")


def hand_over(verb: str, plan: Plan, started: float, summarize: bool) -> int:
    """Hands a command over to the fleet's head, or joins the launcher that is already running
    there. Follows the launcher until it ends or the user detaches. Returns the exit code.
    """
    run, backend = run_folder.run_of(plan.config.name), backend_of(plan.config)
    head = backend.head()
    assert head  # The caller has checked backend.hands_over.
    with head.place(run) as place:
        place.refresh()
        there = handed_over(place)
        finished = verb == "train" and execution.is_finished(plan, run)
        if there and (finished or place.is_running()):
            require_same(head.located, there, run, finished)
        if finished:
            execution.end_remains(run, place, backend)
            return execution.say_finished(plan, run)
        if place.is_running():
            holder = read_holder(run.folder)
            print(
                f"{run.name} is running on {holder.host if holder else 'the fleet'}; following it"
            )
            try:
                return attend(place, backend, LauncherLogs(run), summarize)
            except LauncherGone as error:
                print(f"{error.head}; launching again")
        return attend(place, backend, launch(verb, plan, head, place, started), summarize)


def handed_over(place: Hosts) -> Config | None:
    """Returns the config of the run's last launch, or None if the config is missing or from another
    trainfleet version.
    """
    text = place.read("launch.yaml")
    with NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file, suppress(ConfigError):
        file.write(text)
        file.flush()
        return load_resolved(Path(file.name)) if text else None
    return None


def require_same(config: Config, there: Config, run: Run, finished: bool) -> None:
    """Raises a RunError listing the differences if the run is running or finished with a different
    config.
    """
    was, now = marker.flatten(there), marker.flatten(config)
    keys = [
        key
        for key in now
        if key in was and was[key] != now[key] and not key.startswith(OF_THIS_MACHINE)
    ]
    keys = [key for key in keys if marker.reason(key, config)] if finished else keys
    if keys:
        state = "finished" if finished else "running"
        why = "; ".join(
            f"{key} is {was[key]} in the run, {now[key]} in the config" for key in keys[:8]
        )
        then = (
            "set another name in the config, or run make stop first"
            if not finished
            else "set another name in the config"
        )
        raise RunError(
            f"the run is {state} with another config", where=run.name, why=why, next=then
        )


def asked_of(head: Head, bill: Bill | None) -> dict[str, str]:
    """Returns environment variables that pass on what a launcher on a host can't query from AWS:
    when the machines will be reclaimed, and how much was prepaid. If the run rehearses a fault,
    they also request the fault.
    """
    known = {ENDS: head.ends, PAID: bill.paid if bill and bill.paid else None}
    config = head.config
    fault = faults.environment(config.name, config.world_size, config.train.steps)
    return {name: str(value) for name, value in known.items() if value is not None} | fault


def launch(verb: str, plan: Plan, head: Head, place: Hosts, started: float) -> LauncherLogs:
    """Examines the hosts and starts a launcher on the first suitable one. Returns the launcher's
    logs, skipping lines from earlier launches.

    Raises:
        ConfigError: the run's budget is exhausted.
        BackendError: the preflight failed, another run is running, or the launcher does not start.
    """
    run = place.run
    secrets = values_of(plan.config.fleet.secrets)
    backend = backend_of(plan.config)
    Budget(run, plan.config, backend.bill()).require()
    sound = _prepare(plan, head, place)
    # The nodes now have the current code, so an earlier launch can be detected.
    place.refresh()
    before, words = newest_holder(run.folder), LauncherLogs(run).from_now_on()
    term = before.term if before else 0
    command = (head.interpreter, "-m", "trainfleet", verb, f"CONFIG={place.head.run}/launch.yaml")
    launcher = Launcher(command, {STARTED: str(started), **asked_of(head, backend.bill())}, secrets)
    first, standbys = sound[0], sound[1:2]
    try:
        place.head.start(first, launcher)
        print(f"launched on {first.name}; the run continues if this terminal closes")
        appoint(place, standbys, launcher, term)
        await_lease(place, first, term, words)
    except (KeyboardInterrupt, BackendError):  # The launcher must no longer take the lease.
        _withdraw(plan, place, standbys)
        raise
    leads(run)
    return words


def _prepare(plan: Plan, head: Head, place: Hosts) -> list[Host]:
    """Selects mutually compatible hosts, and writes the run's config to this machine and to them.
    Returns the hosts.
    """
    plan, sound = fit_hosts(plan, head, place.run)
    run_folder.write_atomic(place.run.config, dump_resolved(plan.config))
    run_folder.write_atomic(place.run.given, plan.asked)
    place.head.prepare({host: head.facts[host] for host in sound}, plan.requests, plan.asked)
    return sound


def _withdraw(plan: Plan, place: Hosts, standbys: list[Host]) -> None:
    """Stops a launcher that has not taken the lease, and dismisses its standby hosts. Prints a
    warning on failure.
    """
    backend = backend_of(plan.config)
    try:
        backend.stop(backend.find(place.run), at_once=True)
        for host in standbys:
            place.head.dismiss(host)
    except BackendError as error:
        print(f"warning: the launcher may still start; run make stop to end it: {error}")


def fit_hosts(plan: Plan, head: Head, run: Run) -> tuple[Plan, list[Host]]:
    """Selects mutually compatible hosts. Returns them with a plan that excludes the others. Raises
    BackendError if there are too few, or if another run uses them.
    """
    backend = backend_of(plan.config)
    sound, unsound = head.survey(head.transport.hosts)
    for hosts, why in grouped(unsound):
        print(f"{names(hosts)} {'is' if len(hosts) == 1 else 'are'} skipped: {why}")
    head.require_own_folder(sound)
    # The preflight would disturb a job that is still running.
    if Can.EXAMINE not in backend.can or execution.left_running(plan.config, run):
        return plan, sound
    head.refuse_other_runs(sound)  # The preflight would disturb other runs.
    if without := pass_preflight(head, sound):
        sound = [host for host in sound if host.name not in without]
        plan = replace(
            plan, requests=tuple(backend.plan(request.job, without) for request in plan.requests)
        )
    return plan, sound


def appoint(place: Hosts, hosts: list[Host], launcher: Launcher, term: int) -> None:
    """Appoints standby hosts. If a host fails, the launcher appoints another one later."""
    before = newest_standby(place.run.folder)
    for host in hosts:
        try:
            place.head.appoint(host, launcher, before.number + 1 if before else 1, term)
        except BackendError as error:
            print(f"warning: {host.name} is not a standby yet: {error}")


def await_lease(place: Hosts, host: Host, term: int, words: LauncherLogs) -> None:
    """Waits until the launcher has taken its lease, with a term higher than `term`.

    Raises:
        BackendError: the launcher exited first or timed out. Its output is printed.
    """
    deadline = time.monotonic() + TO_BEGIN
    while True:
        late = time.monotonic() > deadline
        try:
            ended = place.head.has_ended(host)
            place.refresh()
        except BackendError:  # A failed network link or host may recover.
            if late:
                raise
            ended = False
        holder = read_holder(place.run.folder)
        if holder and holder.term > term:
            return
        if ended or late:
            words.show()
            raise BackendError(
                "the launcher did not start", where=host.name, next=f"less {words.logs[0]}"
            )
        time.sleep(LOOK_EVERY / 2)


def pass_preflight(head: Head, sound: list[Host]) -> dict[str, str]:
    """Checks before a job starts that its nodes are compatible, and tests their links if the
    instance type is known. Replaces unfit hosts with spares. Returns the excluded hosts with
    reasons.

    Raises:
        BackendError: too few hosts are fit. The error lists the reasons per host.
    """
    config, without = head.located, dict[str, str]()
    nodes = config.fleet.nodes
    while nodes > 1:
        fit = [host for host in sound if host.name not in without]
        report = examine(head.transport, config, fabric=config.fleet.is_told, hosts=fit[:nodes])
        if report.passed:
            print(f"preflight passed: {'; '.join(report.describe(None))}")
            break
        head.quarantine.add_blamed(report.findings)
        unfit = {finding.host.name: str(finding) for finding in report.findings if finding.host}
        if not unfit or len(fit) - len(unfit) < nodes:
            raise _unfit(report, fit)
        for name, why in unfit.items():
            print(f"a spare replaces {name}: {why}")
        without |= unfit
    return without


def _unfit(report: PreflightReport, hosts: list[Host]) -> BackendError:
    """Returns the error for a preflight with too few suitable hosts."""
    of_all = [f"\n  fleet: {finding}" for finding in report.findings if finding.host is None]
    what = f"the preflight failed: these nodes can't train together{''.join(of_all)}"
    said = {host: "; ".join(map(str, found)) for host in hosts if (found := report.against(host))}
    return BackendError(by_host(what, said), next="run make setup, then make doctor")


class LeftAlone(Exception):
    """Raised when the user detaches while the run continues."""


class LauncherLogs:
    """Logs of the run's launcher and its standbys. After a takeover, the standby's log continues
    the launcher's.
    """

    def __init__(self, run: Run) -> None:
        self.folder = run.logs
        self.shown = dict[Path, int]()

    @property
    def logs(self) -> list[Path]:
        return [self.folder / "launcher.log", *sorted(self.folder.glob("standby*.log"))]

    def from_now_on(self) -> Self:
        """Skips all existing lines."""
        self.shown = {log: records.size_of(log) for log in self.logs}
        return self

    def show(self) -> None:
        """Prints new complete lines without their timestamps."""
        for log in self.logs:
            lines, self.shown[log] = records.whole_lines(log, self.shown.get(log, 0))
            for line in lines:
                print(line.decode(errors="replace").partition(" | ")[2])


def attend(place: Hosts, backend: Backend, words: LauncherLogs, summarize: bool) -> int:
    """Prints the launcher's output until it ends, and returns its exit code. Ctrl-C only detaches
    from the launcher.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise LeftAlone

    before = [signal.signal(number, leave) for number in SIGNALS]
    try:
        code = follow_launcher(place, words)
        backend.learn(place.run)
        if summarize and code != 1 and place.run.metrics.exists():
            # The report is generated here instead of fetched, because a browser would run scripts
            # in a report from the head.
            html.write(place.run)
            print_summary(place.run)
        return code
    except LeftAlone:
        # A run whose launch was cancelled must not be left unattended, so it is followed until it
        # has stopped.
        if is_cancelled():
            place.ask_to_stop()
            if (code := follow_launcher(place, words)) == execution.STOPPED:
                print(f"{place.run.name} is stopped")
            return code
        print(f"{place.run.name} continues without this terminal")
        print("next: run make train to reattach, or make status, make logs FOLLOW=1, make stop")
        return execution.STOPPED
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


class LauncherGone(RunError):
    """Raised when a run's launcher is gone and no standby has taken over."""


def follow_launcher(place: Hosts, words: LauncherLogs) -> int:
    """Prints the launcher's output until it ends. Returns its exit code.

    Raises:
        BackendError: no host has responded for SILENCE seconds.
        LauncherGone: the run no longer has a launcher.
    """
    heard, leads = time.monotonic(), Leads(place.run)
    while True:
        try:
            place.refresh()
            heard = time.monotonic()
        except BackendError:
            if time.monotonic() - heard > SILENCE:
                raise
        words.show()
        holder = newest_holder(place.run.folder)
        if holder and holder.code is not None:
            time.sleep(LOOK_EVERY)  # The launcher's last lines may arrive after its exit code.
            place.refresh()
            words.show()
            # A different holder means that this launcher was frozen and another one has taken over.
            if newest_holder(place.run.folder) == holder:
                return holder.code
        elif holder and leads.look(time.monotonic() - heard + LOOK_EVERY) > SILENCE:
            raise LauncherGone(
                "the launcher is gone, and no other host took over",
                where=holder.host,
                next="run make train to resume from the last checkpoint",
            )
        time.sleep(LOOK_EVERY)


class Leads:
    """Detects whether a launcher leads a run or is about to, from local copies of launcher and
    standby heartbeats.
    """

    def __init__(self, run: Run) -> None:
        self.folder = run.folder
        self.vacancies = [Vacancy(renewed=True), Vacancy(renewed=True)]

    def look(self, since: float) -> float:
        """Returns the number of seconds for which both launcher and standby have been silent.
        `since` is the time since the last poll in seconds.
        """
        found = newest_holder(self.folder), newest_standby(self.folder)
        self.vacancies = [
            vacancy.look(one, since) for vacancy, one in zip(self.vacancies, found, strict=True)
        ]
        return min(vacancy.silent for vacancy in self.vacancies)
