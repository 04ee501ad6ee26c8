"""Two users, three runs, one fleet of eight nodes and random faults: every run ends as if nothing had happened to it.

A run that is done begins anew under another name until the time is over. SOAK_SECONDS is that time, half an hour if it is not set,
and SOAK_SEED draws other faults. A command that ends otherwise than finished is typed again, as its user would, and counted.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cockpit import Cockpit, pin

import verbs
from fleet.lab import USERS, Lab, lab
from trainfleet.hosts.host_commands import LAUNCHER, MARK

SECONDS = float(os.environ.get("SOAK_SECONDS", "1800"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
STEPS = 600
PATIENCE = 900.0  # seconds that one command may take
TYPED = 12  # times that one run's command is typed at most
FOLDERS = {"trainer": "/fsx/trainfleet", "colleague": "/fsx/trainfleet-colleague"}


@dataclass
class Desk:
    """A user who has one run after another trained, on two of the fleet's hosts from `first` on; the rest are spares."""

    nodes: Lab
    folder: Path
    user: str
    name: str
    first: int
    cockpit: Cockpit | None = None
    looker: subprocess.Popen[str] | None = None
    typed: int = 0
    done: list[Cockpit] = field(default_factory=list)

    def new_cockpit(self) -> Cockpit:
        hosts = self.nodes.hosts()
        name = f"{self.name}-{len(self.done)}"
        hosts = hosts[self.first :] + hosts[: self.first]
        fleet = self.nodes.fleet(
            self.user, nodes=2, hosts=hosts, shared_folder=FOLDERS[self.user], exclusive=False
        )
        return Cockpit(self.nodes, self.folder / name, name, **fleet)

    def train(self) -> None:
        """One run, to its end."""
        self.cockpit = cockpit = self.new_cockpit()
        said = []
        for _ in range(TYPED):
            self.typed += 1
            self.looker = cockpit.start("train", f"SET=train.steps={STEPS}")
            said.append(self.looker.communicate(timeout=PATIENCE)[0])
            if self.looker.returncode == 0:
                break
            time.sleep(1)
        else:
            raise AssertionError("\n== typed again\n".join(said) + cockpit.words())
        self.done.append(cockpit)
        self.cockpit = None

    def train_on(self, until: float) -> None:
        while time.time() < until or not self.done:
            self.train()

    def find(self, pattern: str, without: str = "nothing lacks this") -> list[tuple[int, int]]:
        """The node and the process id of what its run has on any node, by its command line."""
        return [
            (node, pid)
            for node in range(self.nodes.count)
            for pid in set(self.nodes.processes(node, pattern))
            - set(self.nodes.processes(node, without))
        ]

    def ranks(self) -> list[tuple[int, int]]:
        return self.find(f"trainfleet.engine runs/{self._name} ", "torch.distributed.run")

    def agents(self) -> list[tuple[int, int]]:
        return [(node, pid) for node, pid in self.find(f"trainfleet.engine runs/{self._name} ", "trainfleet.node.supervisor")
                if (node, pid) not in self.ranks()]  # fmt: skip

    def launchers(self) -> list[tuple[int, int]]:
        return self.find(f"runs/{self._name}/logs/launcher.log")

    @property
    def _name(self) -> str:
        return self.cockpit.name if self.cockpit else "none"


@dataclass
class Fate:
    """What happens to the runs, one thing after another, as the seed has it."""

    nodes: Lab
    desks: list[Desk]
    chance: random.Random
    struck: Counter[str] = field(default_factory=Counter)

    def strike_on(self, until: float) -> None:
        faults: dict[str, Callable[[Desk], bool]] = {
            "rank killed": lambda desk: self.signal(desk.ranks(), signal.SIGKILL),
            "rank stopped": lambda desk: self.signal(desk.ranks(), signal.SIGSTOP),
            "agent killed": lambda desk: self.signal(desk.agents(), signal.SIGKILL),
            "agent stopped": lambda desk: self.signal(desk.agents(), signal.SIGSTOP),
            "launcher killed": lambda desk: self.signal(desk.launchers(), signal.SIGKILL),
            "node off and on": lambda desk: self.of_node(desk, self.nodes.destroy, self.boot),
            "link cut and joined": lambda desk: self.of_node(desk, self.nodes.cut, self.nodes.join),
            "sshd hangs": lambda desk: self.of_node(desk, self.nodes.shut, self.nodes.open),
            "terminal closed": self.close_terminal,
            "stopped by its user": self.stop,
        }
        while time.time() < until:
            time.sleep(self.chance.uniform(5, 30))
            name, desk = self.chance.choice(sorted(faults)), self.chance.choice(self.desks)
            if desk.ranks() and faults[name](desk):
                self.struck[name] += 1

    def signal(self, processes: list[tuple[int, int]], number: signal.Signals) -> bool:
        if processes:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(self.chance.choice(processes)[1], number)
        return bool(processes)

    def of_node(
        self, desk: Desk, strike: Callable[[int], None], mend: Callable[[int], None]
    ) -> bool:
        """A node on which the run is, for some seconds; whoever else is on it has it too."""
        ranks = desk.ranks()
        if not ranks:
            return False
        node = self.chance.choice(ranks)[0]
        strike(node)
        time.sleep(self.chance.uniform(1, 25))
        mend(node)
        return True

    def boot(self, node: int) -> None:
        self.nodes.recreate(node)
        pin(self.nodes, node)

    def close_terminal(self, desk: Desk) -> bool:
        assert desk.looker is not None
        desk.looker.kill()
        return True

    def stop(self, desk: Desk) -> bool:
        if desk.cockpit is None:
            return False
        verbs.begin(desk.cockpit.folder, "stop").communicate(timeout=PATIENCE)
        return True


def strangers(nodes: Lab) -> set[str]:
    """Processes of a run of one user that are another's. Root's are none: `sudo dmesg`, of a failed node, has its starter's variables."""
    found = set()
    for node in range(nodes.count):
        for pid in nodes.pids(node):
            try:
                variables, owner = (
                    Path(f"/proc/{pid}/environ").read_bytes(),
                    Path(f"/proc/{pid}").stat().st_uid,
                )
            except OSError:
                continue
            for user, folder in FOLDERS.items():
                others = {*USERS.values()} - {USERS[user]}
                if owner in others and any(
                    f"{kind}={folder}:".encode() in variables for kind in (MARK, LAUNCHER)
                ):
                    found.add(f"node{node}: {owner} runs {pid} of {user}")
    return found


def watch(nodes: Lab, over: threading.Event) -> set[str]:
    found: set[str] = set()
    while not over.wait(2):
        found |= strangers(nodes)
    return found


def assert_apart(nodes: Lab) -> None:
    """No file and no key of one user is in another's."""
    for user, folder in FOLDERS.items():
        shared = nodes.shared / Path(folder).name
        assert {path.lstat().st_uid for path in [shared, *shared.rglob("*")]} == {USERS[user]}
        (other,) = FOLDERS.keys() - {user}
        for node in range(nodes.count):
            home = nodes.root(node) / "home" / user
            assert {path.lstat().st_uid for path in home.rglob("*")} <= {USERS[user]}
            theirs = nodes.root(node) / "home" / other / ".ssh/authorized_keys"
            for key in home.glob(".ssh/id_*.pub"):
                assert not theirs.exists() or key.read_text().split()[1] not in theirs.read_text()


@pytest.fixture
def eight() -> Iterator[Lab]:
    with lab(8) as nodes:
        verbs.write_text(nodes.shared / "text")
        pin(nodes)
        for node in range(nodes.count):
            for user, number in USERS.items():
                greeting = nodes.root(node) / "home" / user / ".bashrc"
                greeting.write_text(f"echo Welcome, {user}, to node{node}\n")
                os.chown(greeting, number, number)
        yield nodes


@pytest.mark.timeout(SECONDS + 2 * PATIENCE)
def test_random_faults_change_no_run_and_no_user_meets_the_other(
    eight: Lab, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    alone = Desk(eight, tmp_path, "trainer", "undisturbed", 0)
    others = [
        Desk(eight, tmp_path, *which)
        for which in (("trainer", "one", 0), ("trainer", "two", 1), ("colleague", "three", 2))
    ]
    for desk in (alone, others[2]):
        desk.new_cockpit().type("setup")
    alone.train()
    whole = alone.done[0].losses()
    assert whole.keys() >= {1, STEPS}

    fate, over, until = (
        Fate(eight, others, random.Random(SEED)),
        threading.Event(),
        time.time() + SECONDS,
    )
    with ThreadPoolExecutor() as pool:
        watching = pool.submit(watch, eight, over)
        at_work = [pool.submit(desk.train_on, until) for desk in others]
        try:
            fate.strike_on(until)
            for work in at_work:
                work.result()
        finally:
            over.set()
    for desk in others:
        runs = [
            (cockpit.name, cockpit.results()["restarts"], cockpit.losses() == whole)
            for cockpit in desk.done
        ]
        tell(f"{desk.user}: {runs}, make train typed {desk.typed} times")
        assert all(same for _, _, same in runs)
    tell(f"seed {SEED}, {SECONDS:.0f} s: {dict(fate.struck)}")
    assert not watching.result()
    assert_apart(eight)
    deadline = time.time() + 60
    while (left := alone.done[0].leftovers()) and time.time() < deadline:
        time.sleep(1)
    assert not left
