"""What can happen to a run on hosts, as data: a sequence of faults, played on a real run and judged at its end.

A sequence is drawn from a seed or written by hand. Each of its faults has a kind, a role (whom it strikes: the head, the host that
stands by, a node of the run beside the head, or a host that has no part), when it comes, and how long it lasts.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cockpit import Cockpit, pin

from fleet.lab import Lab
from trainfleet.backends.base import load_job
from trainfleet.health.lease import newest_holder
from trainfleet.trust.errors import TrainfleetError

STEPS = 600
LONG = 3600  # of the longest run, whose schedule all others have
NODES = 2  # of the run; four hosts, so that each role has one
BASE, EACH = (
    200.0,
    120.0,
)  # seconds that a run may take, and more for each fault: twice what the longest took
STEP = 0.15  # seconds more for each step: also where others share the cores
GONE = 60.0  # seconds after the run in which all its processes are gone, also from hosts that were out of reach
HEAD, STANDBY, WORKER, SPARE, ALL = "head", "standby", "worker", "spare", "all"


@dataclass(frozen=True)
class Strike:
    """One fault: once rank 0 is in `step` and `after` seconds have passed since the one before; ended after `lasts` seconds."""

    kind: str
    role: str
    step: int = 0
    after: float = 0.0
    lasts: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.lasts:.1f} s" if self.lasts else ""
        return f"{self.kind} of {self.role}{lasts}, at step {self.step} and {self.after:.1f} s after the one before"


@dataclass(frozen=True)
class Kind:
    """A kind of fault: what is done to a host, what ends it, and the causes that a verdict may name for it."""

    strike: Callable[[Stage, int], object]
    causes: frozenset[str]
    mend: Callable[[Stage, int], object] | None = None
    roles: tuple[str, ...] = (HEAD, STANDBY, WORKER)


@dataclass
class Stage:
    """A run, what has been done to it so far, and what is still to be mended."""

    nodes: Lab
    cockpit: Cockpit
    looker: subprocess.Popen[str] | None = None
    typed: int = 0
    said: list[str] = field(default_factory=list)
    struck: list[tuple[Strike, int | None]] = field(
        default_factory=list
    )  # the host is None where all are struck, or none
    leaders: int = 0  # how many of the strikes hit the head, or the host that stood by
    down: dict[tuple[int | None, str], float] = field(
        default_factory=dict
    )  # host and kind → when it is mended
    last: float = 0.0  # when the last strike came
    steps: int = STEPS

    def type(self) -> None:
        self.typed += 1
        self.looker = self.cockpit.start(
            "train",
            f"SET=train.steps={self.steps} train.schedule_steps={LONG} train.warmup_steps=10 checkpoint.every=10",
        )

    def hosts_of(self, role: str) -> list[int]:
        """Those that have this role now, of hosts to which nothing happens now."""
        every, working = [*range(self.nodes.count)], self.working()
        head, standing = self.leading()
        found = {
            HEAD: head,
            STANDBY: standing,
            WORKER: [node for node in working if node not in head],
            SPARE: [node for node in every if node not in head + standing + working],
        }
        return [node for node in found[role] if node not in {host for host, _ in self.down}]

    def leading(self) -> tuple[list[int], list[int]]:
        """The host that leads, and the one that stands by, by the lease; of either none or one."""
        holder = newest_holder(self.cockpit.run.folder)
        hosts = (holder.host, holder.standby) if holder else ("", "")
        head, standing = ([int(host.removeprefix("node"))] if host else [] for host in hosts)
        return head, standing

    def working(self) -> list[int]:
        with suppress(TrainfleetError):
            if job := load_job(self.cockpit.run):
                return [int(host.removeprefix("node")) for host in job[0].hosts]
        return []

    def find(self, node: int, what: str) -> list[int]:
        """Processes of the run on a node: ranks, the agent, the launcher or who stands by."""
        name = self.cockpit.name
        ranks = set(self.nodes.processes(node, f"-u -m trainfleet.engine runs/{name} "))
        if what == "ranks":
            return sorted(ranks)
        if what == "agent":
            return sorted(set(self.nodes.processes(node, "torch.distributed.run")) - ranks)
        return self.nodes.processes(node, f"runs/{name}/logs/{what}.log")

    def signal(self, node: int, what: str, number: signal.Signals) -> None:
        for pid in self.find(node, what):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def strike(self, strike: Strike) -> None:
        """Does it, if there is somebody in that role; what is down already is left alone."""
        kind = KINDS[strike.kind]
        hosts: list[int | None] = [None] if strike.role == ALL else [*self.hosts_of(strike.role)]
        self.last = time.time()
        if not hosts:
            return
        host = hosts[0]
        stood_by = STANDBY in kind.roles and host in self.hosts_of(
            STANDBY
        )  # a worker may be that too
        self.leaders += strike.role in (HEAD, STANDBY, ALL) or stood_by
        self.struck.append((strike, host))
        kind.strike(self, -1 if host is None else host)
        if kind.mend:
            self.down[host, strike.kind] = self.last + strike.lasts

    def mend(self, now: float) -> None:
        for (host, name), until in list(self.down.items()):
            if until <= now and (mend := KINDS[name].mend):
                del self.down[host, name]
                mend(self, -1 if host is None else host)

    def end(self) -> None:
        """Mends all, and leaves nothing of the run: for the next one."""
        self.mend(float("inf"))
        if self.looker:
            self.looker.kill()
            self.looker.communicate()
        for line in self.cockpit.leftovers():
            with suppress(ProcessLookupError):
                os.kill(int(line.split()[1]), signal.SIGKILL)


def freeze(stage: Stage, node: int, number: signal.Signals) -> None:
    """All that runs on a node stops, sshd too; its kernel goes on, and keeps its locks and its connections."""
    for pid in set(stage.nodes.pids(node)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def boot(stage: Stage, node: int) -> None:
    stage.nodes.recreate(node)
    pin(stage.nodes, node)


def cut_off(stage: Stage, node: int) -> None:
    """The link by which it reaches the others, and the folder that they share."""
    stage.nodes.cut(node)
    stage.nodes.server.hold(node)


def join(stage: Stage, node: int) -> None:
    stage.nodes.server.go(node)
    stage.nodes.join(node)


def close_terminal(stage: Stage, node: int) -> None:
    assert stage.looker
    stage.looker.kill()


LOST = frozenset({"lost-node", "slow", "hang", "killed", "victim", "rendezvous", "fabric"})
SHARED = frozenset(
    {"storage", "hang", "slow", "lost-node", "killed", "victim", "mount", "rendezvous", "fabric"}
)
KINDS = {
    "rank killed": Kind(lambda stage, node: stage.signal(node, "ranks", signal.SIGKILL), frozenset({"killed"}), roles=(HEAD, WORKER)),
    "rank stopped": Kind(lambda stage, node: stage.signal(node, "ranks", signal.SIGSTOP), frozenset({"hang"}), roles=(HEAD, WORKER)),
    "agent killed": Kind(lambda stage, node: stage.signal(node, "agent", signal.SIGKILL), frozenset({"killed"}), roles=(HEAD, WORKER)),
    "agent stopped": Kind(lambda stage, node: stage.signal(node, "agent", signal.SIGSTOP), frozenset({"hang"}), roles=(HEAD, WORKER)),
    "launcher killed": Kind(lambda stage, node: [stage.signal(node, what, signal.SIGKILL) for what in ("launcher", "standby")],
                            frozenset(), roles=(HEAD,)),
    "standby killed": Kind(lambda stage, node: stage.signal(node, "standby", signal.SIGKILL), frozenset(), roles=(STANDBY,)),
    "frozen": Kind(lambda stage, node: freeze(stage, node, signal.SIGSTOP), LOST,
                   lambda stage, node: freeze(stage, node, signal.SIGCONT)),
    "without power": Kind(lambda stage, node: stage.nodes.destroy(node), LOST, boot, (HEAD, STANDBY, WORKER, SPARE)),
    "link cut": Kind(lambda stage, node: stage.nodes.cut(node), LOST, lambda stage, node: stage.nodes.join(node)),
    "link and disk cut": Kind(cut_off, LOST, join),
    "sshd hung": Kind(lambda stage, node: stage.nodes.shut(node), frozenset(), lambda stage, node: stage.nodes.open(node)),
    "handles stale": Kind(lambda stage, node: stage.nodes.server.make_stale(node), SHARED),
    "folder failing": Kind(lambda stage, node: stage.nodes.server.fail(node, errno.EIO), SHARED,
                           lambda stage, node: stage.nodes.server.fail(node, 0)),
    "folder stalled": Kind(lambda stage, node: stage.nodes.server.hold(), SHARED, lambda stage, node: stage.nodes.server.go(), (ALL,)),
    "fsync slow": Kind(lambda stage, node: stage.nodes.server.delay_fsync(2.0), frozenset(),
                       lambda stage, node: stage.nodes.server.delay_fsync(0.0), (ALL,)),
    "terminal closed": Kind(close_terminal, frozenset(), roles=(ALL,)),
}  # fmt: skip


def draw(seed: int) -> list[Strike]:
    """One to five faults: some while it trains, some while it recovers from the one before."""
    chance = random.Random(seed)
    drawn, step = list[Strike](), 0
    for _ in range(chance.randint(1, 5)):
        name = chance.choice(sorted(KINDS))
        kind = KINDS[name]
        lasts = (
            round(chance.choice((2.0, 12.0, 30.0)) * chance.uniform(0.5, 1.0), 1)
            if kind.mend
            else 0.0
        )
        at_once = bool(drawn) and chance.random() < 0.5
        step = step if at_once else chance.randint(step + 1, step + STEPS // 6)
        drawn.append(
            Strike(
                name,
                chance.choice(kind.roles),
                step,
                round(chance.uniform(0.0, 25.0), 1) if at_once else 0.0,
                lasts,
            )
        )
    return drawn


def play(stage: Stage, strikes: list[Strike]) -> float:
    """Trains while all that happens; seconds until it was trained. AssertionError when that takes too long."""
    began, coming = time.time(), list(strikes)
    stage.type()
    while stage.looker is not None:
        now = time.time()
        stage.mend(now)
        if (
            coming
            and now - stage.last >= coming[0].after
            and stage.cockpit.step() >= coming[0].step > 0
        ):
            stage.strike(coming.pop(0))
        if stage.looker.poll() is not None:
            look_again(stage)
        limit = BASE + EACH * len(strikes) + STEP * stage.steps
        assert now - began < limit, f"still at it after {now - began:.0f} s{stage.cockpit.words()}"
        time.sleep(0.1)
    return time.time() - began


def look_again(stage: Stage) -> None:
    """Types the command again, as its user would, after one that has ended otherwise than well."""
    assert stage.looker
    said = stage.looker.communicate()[0]
    stage.said.append(said)
    if stage.looker.returncode == 0:
        stage.looker = None
        return
    if stage.looker.returncode == -signal.SIGKILL:
        stage.typed -= 1  # by us: its terminal was closed
    else:
        time.sleep(2)
    stage.type()


def judge(stage: Stage, whole: dict[int, float]) -> None:
    """What was promised: trained, equal to the bit, the verdicts right, nothing left; and no command typed again for one fault."""
    cockpit, said = stage.cockpit, "\n== typed again\n".join(stage.said)
    assert (
        cockpit.results()["status"] == "finished" and cockpit.results()["steps"] == stage.steps
    ), said
    assert cockpit.losses() == {
        step: loss for step, loss in whole.items() if step <= stage.steps
    }, said + cockpit.words()
    for verdict in cockpit.events("verdict"):
        assert fits(verdict, stage.struck), f"{verdict}\n{said}"
    assert "Traceback (most recent call last)" not in said, said
    assert stage.typed <= max(1, stage.leaders), said
    stage.mend(float("inf"))
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), GONE)


def fits(verdict: dict[str, Any], struck: list[tuple[Strike, int | None]]) -> bool:
    """Whether a verdict names a host that was struck, where it names one, and a cause that this can have."""
    hosts = {f"node{node}" for _, node in struck if node is not None}
    anywhere = any(node is None and KINDS[strike.kind].causes for strike, node in struck)
    host = verdict.get("host") or ""
    possible = [
        KINDS[strike.kind].causes
        for strike, node in struck
        if node is None or not host or host == f"node{node}"
    ]
    return (not host or host in hosts or anywhere) and any(
        verdict["cause"] in causes for causes in possible
    )
