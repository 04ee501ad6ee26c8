"""A run on a fleet that is reached by SSH: handing it to the fleet's head, and looking at it from here."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

from .. import runs
from ..backends import ssh
from ..config import Config, dump_resolved
from ..errors import BackendError, RunError
from ..lease import is_held, read_tenure
from ..nodes import jobs, removal
from ..nodes.answers import Failure, Host, Result, Untrue, by_host, reason, untrue
from ..nodes.fleet import wanted_of
from ..nodes.gate import examine
from ..nodes.head import HEADS, Head
from ..nodes.mirror import Mirror
from ..plan.plan import Plan
from ..report import html
from ..report.summary import print_summary
from ..runs import Run
from ..watch.budget import Budget
from . import carry

LOOK_EVERY = 1.0  # seconds
SILENCE = 60.0  # seconds without any host that answers until a look gives up
TO_BEGIN = 20.0  # seconds that a launcher gets to take its office
REMOVAL = 600.0  # seconds: checkpoints are many files, and large
DETACHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Away:
    """A run on a fleet, seen from this machine."""

    words, look_every = " on the fleet", LOOK_EVERY

    def __init__(self, config: Config, run: Run) -> None:
        self.config, self.run = config, run
        self.backend = ssh.of(config)
        self.transport, python = self.backend.transport, wanted_of(config).interpreter
        self.head = Head(self.transport, config, python, self.backend.code)
        self.mirror = Mirror(self.transport, self.backend.folder, self.backend.code, python, run.folder)
        self.now = 0.0  # the fleet's clock at the last look
        self.door: Host | None = None  # the host that answered last

    def __enter__(self) -> Away:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.transport.close()

    def refresh(self) -> None:
        """Brings the run folder up to date here, by the first host that answers.

        Raises:
            BackendError: none does.
        """
        failures: dict[Host, Failure] = {}
        for host in [*([self.door] if self.door else []), *self.transport.hosts]:
            answer = self.mirror.refresh(host)
            if isinstance(answer, float):
                self.now, self.door = answer, host
                return
            failures[host] = answer
            if answer.kind == "exit":
                break  # it answers, and has no such folder: others have none either
        if any(failure.kind == "exit" for failure in failures.values()):
            return
        raise BackendError(by_host("no host of the fleet answers", failures), next="make doctor")

    def is_running(self) -> bool:
        """Whether a launcher was at work at the last refresh."""
        return is_held(read_tenure(self.run.folder), self.now)

    def ask_to_stop(self) -> None:
        self.head.ask_to_stop(self.door or self.transport.hosts[0])

    def end_all(self) -> None:
        """Kills what is left of the run on any host.

        Raises:
            BackendError: a host can't be reached, or a process does not die; by host.
        """
        mark = jobs.mark_of(self.backend.folder, self.run.name)
        answers = self.transport.run(jobs.fence(mark), timeout=ssh.FENCE_TIMEOUT)
        if failed := answers.failed:
            what = f"it is not known that nothing of {self.run.name} runs any more"
            raise BackendError(by_host(what, failed), next="make clean again")
        print(f"nothing of {self.run.name} runs on the fleet's {len(answers)} hosts", flush=True)

    def far_folders(self) -> dict[str, int]:
        """The run's folder and its dataset's on the fleet, with their bytes."""
        shared, folders = self.backend.folder, [f"runs/{self.run.name}", f"data/{self.config.data.name}"]
        found = self._at_the_door(removal.measure(shared, folders))
        try:
            return {f"{shared}/{folder}": count for folder, count in removal.read_measures(found, folders).items()}
        except Untrue as error:
            raise BackendError(str(untrue(error, "what du prints")), where=(self.door or self.transport.hosts[0]).name) from error

    def remove_far(self, folders: Iterable[str]) -> None:
        shared = self.backend.folder
        self._at_the_door(removal.remove(shared, [folder.removeprefix(f"{shared}/") for folder in folders]))

    def _at_the_door(self, command: str) -> str:
        """What a command says on the host that answered last."""
        host = self.door or self.transport.hosts[0]
        answer = self.transport.ask(host, command, timeout=REMOVAL)
        if failure := reason(host, answer):
            raise BackendError(str(failure), where=host.name, next="make clean again")
        assert isinstance(answer, Result)
        return answer.stdout


def carry_away(verb: str, plan: Plan, started: float, summarize: bool) -> int:
    """Gives a verb to the fleet's head, or joins the one that is at work there, and stays until it ends or is left alone."""
    run = runs.run_of(plan.config.name)
    with Away(plan.config, run) as away:
        away.refresh()
        if verb == "train" and carry.is_finished(plan, run):
            return carry.say_finished(plan, run)
        said = size(launcher_log(run))
        if away.is_running():
            said, tenure = 0, read_tenure(run.folder)
            print(f"{run.name} is at work on {tenure.host if tenure else 'the fleet'}; looking on", flush=True)
        else:
            launch(verb, plan, away, started)
        return attend(away, said, summarize)


def launch(verb: str, plan: Plan, away: Away, started: float) -> None:
    """Examines the hosts, and has the first of them launch the run.

    Raises:
        ConfigError: the run has cost all that it may.
        BackendError: the gate is shut, another run is at work, or the launcher does not come up.
    """
    backend, run, secrets = away.backend, away.run, away.backend.secrets()
    Budget(run, plan.config).require()
    sound, unsound = backend.survey(away.transport.hosts)
    chosen, spare = sound[: plan.config.fleet.nodes], sound[plan.config.fleet.nodes :]
    for host, why in unsound.items():
        print(f"{host.name} is left out: {why}", flush=True)
    pass_gate(plan.config, away, chosen)
    ssh.refuse_other_runs(backend, sound, jobs.mark_of(backend.folder, run.name))
    runs.write_atomic(run.config, dump_resolved(plan.config))
    away.head.prepare({host: backend.facts[host] for host in [*chosen, *spare]})
    before, said = read_tenure(run.folder), size(launcher_log(run))
    away.head.start(sound[:HEADS], verb, started, secrets)
    print(f"launched on {chosen[0].name}; it goes on there when this terminal closes", flush=True)
    await_office(away, chosen[0], before.term if before else 0, said)


def await_office(away: Away, host: Host, term: int, said: int) -> None:
    """Returns once the launcher has taken its office, with a term after `term`. Its words begin behind byte `said` of its log.

    Raises:
        BackendError: it has ended before that, or takes too long; with its words.
    """
    deadline = time.monotonic() + TO_BEGIN
    while True:
        ended = away.head.has_ended(host)
        away.refresh()
        tenure = read_tenure(away.run.folder)
        if tenure and tenure.term > term:
            return
        if ended or time.monotonic() > deadline:
            show(launcher_log(away.run), said)
            raise BackendError("the launcher did not come up", where=host.name, next=f"less {launcher_log(away.run)}")
        time.sleep(LOOK_EVERY / 2)


def pass_gate(config: Config, away: Away, hosts: list[Host]) -> None:
    """Several nodes must fit together before a job starts on them; links are tried where the instance type promises some."""
    if len(hosts) < 2:
        return
    report = examine(away.transport, config, fabric=config.fleet.instance_type is not None, hosts=hosts)
    for finding in report.findings:
        if finding.blames_host and finding.host:
            away.backend.quarantine.add(finding.host, finding.message)
    if not report.is_open:
        rows = "\n".join(f"  {finding.host.name if finding.host else 'fleet'}: {finding}" for finding in report.findings)
        raise BackendError(
            f"the gate is shut: the nodes are not fit to train together\n{rows}", next="make setup, then make doctor"
        )


class LeftAlone(Exception):
    """The person here turned away; the run goes on."""


def attend(away: Away, shown: int, summarize: bool) -> int:
    """Shows the launcher's words, from byte `shown` on, until it has ended; its exit code. Ctrl-C only ends the looking on."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise LeftAlone

    before = [signal.signal(number, leave) for number in DETACHED]
    heard = time.monotonic()
    try:
        while True:
            try:
                away.refresh()
                heard = time.monotonic()
            except BackendError:
                if time.monotonic() - heard > SILENCE:
                    raise
            shown = show(launcher_log(away.run), shown)
            tenure = read_tenure(away.run.folder)
            if tenure and tenure.code is not None:
                time.sleep(LOOK_EVERY)  # its last words follow
                away.refresh()
                show(launcher_log(away.run), shown)
                learn(away)
                if summarize and tenure.code != 1 and away.run.metrics.exists():
                    html.write(away.run)  # the head's own is not brought: a browser would run what it says
                    print_summary(away.run)
                return tenure.code
            check_alive(away)
            time.sleep(LOOK_EVERY)
    except LeftAlone:
        print(f"{away.run.name} goes on without this terminal")
        print("next: make train looks on again; make status, make logs FOLLOW=1, make stop")
        return carry.STOPPED
    finally:
        for number, handler in zip(DETACHED, before, strict=True):
            signal.signal(number, handler)


def learn(away: Away) -> None:
    """Keeps in this machine's quarantine list what the watchdog found against hosts."""
    hosts = {host.name: host for host in away.transport.hosts}
    events = away.run.read_events()
    launch = max((place for place, event in enumerate(events) if event["event"] == "launched"), default=0)
    for event in events[launch:]:  # what earlier launches found was learnt then, and may have been lifted since
        if event["event"] == "quarantined" and (host := hosts.get(event.get("host", ""))):
            away.backend.quarantine.add(host, event.get("evidence", ""), "watchdog")


def check_alive(away: Away) -> None:
    """RunError when the launcher has been silent for so long that no host will take over any more."""
    tenure = read_tenure(away.run.folder)
    if tenure and away.now - tenure.time > SILENCE:
        raise RunError(
            "its launcher is gone, and no other took over", where=tenure.host, next="make train goes on from the last checkpoint"
        )


def show(log: Path, start: int) -> int:
    """Prints the whole lines of the launcher's log behind byte `start`, without their stamps; where they end."""
    lines, end = runs.whole_lines(log, start)
    for line in lines:
        print(line.decode(errors="replace").partition(" | ")[2], flush=True)
    return end


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def launcher_log(run: Run) -> Path:
    return run.logs / "launcher.log"
