"""Implements `make setup` on hosts: reads every node, runs the missing steps, and verifies the
result.

Unfit hosts (unreachable, without sudo, or with a full disk) are reported and left unchanged. The
other hosts are still set up, but the command fails. Setup is idempotent.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..config import Config
from ..trust.errors import BackendError
from ..trust.safe_output import is_agreed
from . import facts as reading
from .facts import Facts
from .fleet import open_fleet, wanted_of
from .host_results import (
    SETUP,
    Board,
    Finding,
    Host,
    HostFailure,
    Result,
    grouped,
    heard,
    reason,
    sound,
)
from .install_steps import PHASES, InstallStep, Wanted, steps
from .node_checks import interpreter, judge, shared
from .tar import code_files, content_hash
from .transport import Transport

# in seconds; the longest steps, a driver build and the torch download, take several minutes
STEP_TIMEOUT = 2400.0
BOOT_TIMEOUT = 900.0  # timeout in seconds; large instances take ten minutes to boot
NEEDS_BOOT = 3  # exit code of a script whose changes require a reboot
SCRIPTS = "scripts"  # subfolder for scripts in the folder that send_scripts creates


@dataclass(frozen=True)
class Survey:
    """State before setup: facts and missing steps of the fit hosts, and findings about the
    others.
    """

    facts: dict[Host, Facts]
    plan: dict[Host, tuple[InstallStep, ...]]
    findings: tuple[Finding, ...]

    @property
    def against(self) -> dict[Host, str]:
        """Findings about each unfit host."""
        said = defaultdict[Host, list[str]](list)
        for finding in self.findings:
            if finding.host:
                said[finding.host].append(str(finding))
        return {host: "; ".join(words) for host, words in said.items()}


def main(config: Config, whole: bool = True, temporary: bool = False) -> int:
    """Runs the setup. Returns 0 if all hosts are ready, or 1 otherwise. See install_steps.Wanted
    for `whole` and `temporary`.
    """
    began = time.monotonic()
    wanted = replace(wanted_of(config), whole=whole, temporary=temporary)
    with open_fleet(config) as transport:
        found = survey(transport, config, wanted)
        # the first round may reach only the jump host, and the hosts behind it come in the next
        # round
        while meet(transport, found.findings, is_agreed):
            found = survey(transport, config, wanted)
        with Board(transport.hosts) as board:
            Application(transport, config, wanted, found, board).run()
        changed, failed = len(board.in_state("changed")), len(board.in_state("FAILED"))
    ready = len(transport.hosts) - failed
    print(
        f"{ready} of {len(transport.hosts)} hosts ready, {changed} changed, "
        f"{time.monotonic() - began:.1f} s"
    )
    print(
        f"next: fix the {failed} failed hosts or remove them from fleet.hosts, then run make setup"
        if failed
        else "next: make train"
    )
    return 1 if failed else 0


def survey(transport: Transport, config: Config, wanted: Wanted) -> Survey:
    """Reads all hosts and plans the missing steps of the fit ones. Makes no changes."""
    found, findings = heard(reading.read(transport, config))
    findings += judge(SETUP, found, wanted)
    fit = sound(found, findings)
    plan = {
        host: steps(fact, wanted, head=host == transport.hosts[0]) for host, fact in fit.items()
    }
    return Survey(fit, plan, tuple(findings))


def meet(transport: Transport, findings: Sequence[Finding], ask: Callable[[str], bool]) -> bool:
    """Shows all unknown host keys and trusts them if the user agrees.

    Returns whether the keys are now trusted.
    """
    said = [finding for finding in findings if finding.check == "unknown-key"]
    behind = any(finding.message.startswith("the jump host") for finding in said)
    strangers = (
        [said[0].message] if behind else [f"{finding.host}  {finding.message}" for finding in said]
    )
    which = "this host key" if len(strangers) == 1 else f"these {len(strangers)} host keys"
    if not strangers or not ask("\n".join([*strangers, f"Trust {which} from now on?"])):
        return False
    transport.known.trust(dict(transport.known.seen))
    return True


@dataclass
class Application:
    """Applies a setup plan. All changes to nodes are made by this class."""

    transport: Transport
    config: Config
    wanted: Wanted
    found: Survey
    board: Board
    # last output line of each completed script
    done: dict[Host, list[str]] = field(default_factory=dict)
    failed: dict[Host, str] = field(default_factory=dict)

    @property
    def head(self) -> Host:
        return self.transport.hosts[0]

    def run(self) -> None:
        """Executes the plan. On the board, each host ends as ok, changed or FAILED."""
        for hosts, why in grouped(self.found.against):
            self.failed |= dict.fromkeys(hosts, why)
            self.board.show_all(hosts, "FAILED", why)
        busy = [host for host, plan in self.found.plan.items() if plan]
        facts = dict(self.found.facts)
        if busy:
            self.scripts = self.send_scripts(busy)
            self.run_phases(busy)
            facts |= self.look_again([host for host in self.found.plan if host not in self.failed])
        # Setup can't fix these findings.
        for finding in (*interpreter(facts, self.wanted), *shared(facts, self.wanted)):
            if finding.host and finding.host not in self.failed:
                self.fail(finding.host, str(finding))
        for host in [host for host in self.found.plan if host not in self.failed]:
            if host in busy:
                self.board.show(host, "changed", "; ".join(self.done[host]))
            else:
                self.board.show(host, "ok", "nothing to do")

    def send_scripts(self, hosts: Iterable[Host]) -> str:
        """Sends this checkout's scripts and lock files to the nodes, and marks the failed hosts.

        Returns the scripts' folder, relative to the user's home directory.
        """
        folder, failed = send_scripts(self.transport, hosts)
        for host, failure in failed.items():
            self.fail(host, str(failure))
        return folder

    def run_phases(self, busy: list[Host]) -> None:
        for phase in PHASES:
            # Later phases need files that the head creates.
            if phase != "node" and self.head in self.failed:
                for host in busy:
                    if (
                        any(step.phase != "node" for step in self.found.plan[host])
                        and host not in self.failed
                    ):
                        self.fail(host, f"not started: the head {self.head} failed")
                return
            booting: list[Host] = []
            sound = [host for host in busy if host not in self.failed]
            self.transport.each(
                lambda host, phase=phase, booting=booting: self.take_steps(host, phase, booting),  # type: ignore[misc]
                sound,
            )
            for host in booting:  # Reboot one host at a time, so that the others stay available.
                self.board.show(host, "booting", "the changes take effect after a reboot")
                if boot(self.transport, host, self.found.facts[host]):
                    self.done[host].append("booted")
                    self.take_steps(host, phase, [])
                else:
                    self.fail(host, f"did not respond within {BOOT_TIMEOUT:.0f} s after the reboot")

    def take_steps(self, host: Host, phase: str, booting: list[Host]) -> None:
        """Runs a host's steps in this phase in order, until one fails or requires a reboot."""
        said = self.done.setdefault(host, [])
        for step in [step for step in self.found.plan[host] if step.phase == phase]:
            self.board.show(host, "working", f"{step.name}: {step.why}")
            command = step.command(self.scripts, self.found.facts[host].user == "root")
            answer = self.transport.ask(host, command, timeout=STEP_TIMEOUT)
            if (
                isinstance(answer, Result)
                and answer.exit_code == NEEDS_BOOT
                and "booted" not in said
            ):
                booting.append(host)
                return
            if failure := reason(answer):
                self.fail(host, f"{step.name}: {last_line(answer) or failure}")
                return
            said.append(last_line(answer))

    def look_again(self, hosts: list[Host]) -> dict[Host, Facts]:
        """Rereads the hosts, marks those that still need a step as failed, and returns the facts of
        the rest.
        """
        found = {}
        for host, answer in reading.read(self.transport, self.config, hosts).items():
            if isinstance(answer, HostFailure):
                self.fail(host, str(answer))
            elif left := steps(answer, self.wanted, head=host == self.head):
                self.fail(
                    host,
                    "setup is still incomplete: "
                    + "; ".join(f"{step.name}: {step.why}" for step in left),
                )
            else:
                found[host] = answer
        return found

    def fail(self, host: Host, why: str) -> None:
        self.failed[host] = why
        self.board.show(host, "FAILED", why)


def send_scripts(
    transport: Transport, hosts: Iterable[Host]
) -> tuple[str, dict[Host, HostFailure]]:
    """Sends this checkout's scripts and lock files to the nodes.

    Returns the scripts' folder, relative to the user's home directory, and the hosts that failed.
    """
    files = {
        name: data
        for name, data in code_files("").items()
        if name.startswith(("scripts/", "requirements"))
    }
    folder = f".trainfleet/{content_hash(files)}"
    return f"{folder}/{SCRIPTS}", transport.put_once(files, folder, hosts=hosts).failed


def boot(transport: Transport, host: Host, before: Facts) -> bool:
    """Reboots a host.

    Returns True as soon as the host responds with a new boot ID, or False after BOOT_TIMEOUT.
    """
    sudo = "" if before.user == "root" else "sudo -n "
    transport.run(f"{sudo}sh -c '(sleep 1; reboot) > /dev/null 2>&1 &'", timeout=20, hosts=[host])
    deadline = time.monotonic() + BOOT_TIMEOUT
    while time.monotonic() < deadline:
        time.sleep(1)
        answer = transport.read("/proc/sys/kernel/random/boot_id", timeout=8, hosts=[host])[host]
        if (
            isinstance(answer, Result)
            and answer.exit_code == 0
            and answer.stdout.strip() != before.boot_id
        ):
            return True
    return False


def last_line(answer: Result | HostFailure) -> str:
    """Returns the last line of a script's stdout, which states its result.

    If the script failed, appends the last line of stderr.
    """
    if isinstance(answer, HostFailure):
        return answer.message
    streams = (
        answer.stdout,
        answer.stderr if answer.exit_code or not answer.stdout.strip() else "",
    )
    return "; ".join(text.strip().splitlines()[-1].strip() for text in streams if text.strip())


def commands(config: Config) -> dict[str, str]:
    """Returns the exact commands that setup would run now: file name → shell script, one per host.

    `make plan OUT=` writes them to files.

    Raises:
        BackendError: a host can't be read, or is unfit.
    """
    wanted = wanted_of(config)
    with open_fleet(config) as transport:
        found = survey(transport, config, wanted)
    if found.findings:
        rows = "\n".join(f"  {finding.host}: {finding}" for finding in found.findings)
        raise BackendError(
            f"can't plan the setup of these hosts:\n{rows}",
            next="fix them, or remove them from fleet.hosts",
        )
    return {
        f"setup-{host.name}.sh": script(found.facts[host], plan)
        for host, plan in found.plan.items()
    }


def script(facts: Facts, plan: Iterable[InstallStep]) -> str:
    """Returns a shell script that runs the steps, each with a comment that states its phase and
    reason.
    """
    lines = [
        line
        for step in plan
        for line in (f"# {step.phase}: {step.why}", step.command(SCRIPTS, facts.user == "root"))
    ]
    return "\n".join(["#!/bin/sh", "set -e", *lines, ""])
