"""The whole line on AWS: instances that are sshd nodes, made, trained on, scaled, replaced, taken away, and proven gone.

AWS is a pretended account (tests/aws); what runs on its instances is real. `make` is typed in a folder that is lost on the way.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from aws import elsewhere
from aws.account import Account
from aws.metal import Metal, metadata, on_metal, theirs
from aws.world import strangers
from fleet.lab import Lab, address_of, lab
from trainfleet.backends import backend_of, terms_of
from trainfleet.config import Settings, load
from trainfleet.hosts.fleet import Quarantine
from trainfleet.hosts.host_results import Host
from trainfleet.run.run_folder import Run
from trainfleet.watch.budget import Budget
from verbs import PACKAGES, ROOT, finish, losses, write_text

SPEED = 60.0


class Place:
    """A folder in which verbs are typed, on a machine whose AWS is the account."""

    def __init__(self, folder: Path, address: str, lab: Lab, **changes: Any) -> None:
        self.folder, self.address = folder, address
        folder.mkdir()
        fleet = {
            "backend": "ec2",
            "nodes": 4,
            "min_nodes": 1,
            "spot": True,
            "shared_folder": "/fsx/trainfleet",
            "python": sys.executable,
        }
        said = {
            "name": "cloudy", "fleet": fleet | on_metal(lab),
            "data": {"name": "text", "sources": ["/fsx/text"], "vocab_size": 340, "validation_fraction": 0.1},
            "model": {"layers": 2, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
            "train": {"steps": 8, "precision": "fp32", "global_batch_size": 8, "sequence_length": 32, "log_every": 1, "validate_every": 0},
            "checkpoint": {"every": 4},
        } | changes  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(said))

    def begin(self, verb: str, *words: str) -> subprocess.Popen[str]:
        path = f"{PACKAGES}{os.pathsep}{ROOT / 'tests'}"
        environment = os.environ | {
            "PYTHONPATH": path,
            "NO_COLOR": "1",
            elsewhere.VARIABLE: self.address,
            elsewhere.SPEED: str(SPEED),
        }
        return subprocess.Popen([sys.executable, "-m", "aws.elsewhere", verb, *words], cwd=self.folder, env=environment, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    def type(self, verb: str, *words: str, code: int = 0) -> str:
        return finish(self.begin(verb, *words), code)


@contextmanager
def account_on(nodes: Lab) -> Iterator[tuple[Account, Metal, str]]:
    account = Account(speed=SPEED)
    theirs(account)
    strangers(account)
    metal = Metal(nodes, account)
    with elsewhere.served(account) as address:  # on this side of the lab's network
        yield account, metal, address


def running(account: Account) -> list[str]:
    """The ids of our instances that run, in the order of their slots."""
    found = [
        thing for thing in account.of("instance") if thing.made_by and thing.state == "running"
    ]
    return [thing.id for thing in sorted(found, key=lambda thing: thing.since)]


def until(what: str, run: Run, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not any(event["event"] == what for event in run.read_events()):
        assert time.monotonic() < deadline, (
            f"no {what}: {[event['event'] for event in run.read_events()]}"
        )
        time.sleep(0.2)


@pytest.mark.timeout(900)
def test_from_nothing_to_a_trained_model_and_back_to_nothing(tmp_path: Path) -> None:
    with lab(6) as nodes, account_on(nodes) as (account, metal, address):
        write_text(nodes.shared / "text")
        before = dict(account.things)
        place = Place(tmp_path / "laptop", address, nodes)

        said = place.type("setup", "NODES=4")
        assert "4 of 4 hosts ready" in said and "Node3" in said
        four = running(account)
        assert len(four) == 4
        known = (place.folder / ".fleet/trainfleet-cloudy/known_hosts").read_text()
        assert all(nodes.host_key(node) in known for node in range(4)), (
            "learnt from the console, and from nowhere else"
        )

        said = place.type("train", "NODES=4")
        run = Run(nodes.shared / "trainfleet/runs/cloudy")
        results = run.read_results()
        assert (results["status"], results["nodes"], results["backend"]) == (
            "finished",
            4,
            "ec2",
        ), said
        assert len(losses(run.folder)) == 8 and f"launched on {four[0]}" in said

        guest = (
            "SET=name=guest fleet.aws.share_fleet_of=cloudy train.steps=4 train.schedule_steps=4"
        )
        assert "machines belong to the config cloudy" in place.type("plan", "NODES=4", guest)
        assert "belong to the config cloudy; only that config can set them up" in place.type(
            "setup", "NODES=4", guest, code=1
        )
        place.type("train", "NODES=4", guest)
        assert Run(nodes.shared / "trainfleet/runs/guest").read_results()["status"] == "finished"
        assert "the machines are kept" in place.type("clean", "PURGE=1", "YES=1", guest)
        assert (
            running(account) == four
            and not (nodes.shared / "trainfleet/runs/guest").exists()
            and run.config.exists()
        )

        said = place.type("setup", "NODES=2")
        assert running(account) == four[:2], "the others were left alone"

        os.chdir(place.folder)
        Quarantine().add(Host(four[1], "10.77.0.3"), "its link is slow")
        said = place.type("setup", "NODES=2")
        two = running(account)
        assert two[0] == four[0] and two[1] not in four and "2 of 2 hosts ready" in said
        assert not Quarantine().entries(), "a machine that is no more is forgotten"

        shutil.rmtree(tmp_path / "laptop")  # the laptop is lost
        other = Place(tmp_path / "another", address, nodes)
        with metadata() as service:
            process = other.begin("train", "NODES=2", "SET=train.steps=100000")
            deadline = time.monotonic() + 120
            while run.read_results().get("steps", 0) < 12 and time.monotonic() < deadline:
                time.sleep(0.2)
            service.only = address_of(metal.node_of[two[1]])
            service.notice = json.dumps({"action": "terminate", "time": "2026-11-22T08:22:00Z"})
            until("restarted", run)
        events = [event for event in run.read_events() if event["event"] == "restarted"]
        assert events[-1]["cause"] == "preempted" and events[-1]["nodes"] == 1, events
        assert events[-1]["hosts"] == two[:1]
        said = other.type("stop")
        finish(process, 130)
        stopped = run.read_results()
        assert stopped["status"] == "stopped" and stopped["nodes"] == 1 and stopped["steps"] > 12

        config = load(
            Settings(other.folder / "config.yaml", "", {"NODES": ("fleet.nodes", "1")}), terms_of
        )[0]
        idle = Budget(
            run, config, backend_of(config).bill()
        )  # the nodes were paid for since the stop, too
        limit = max(idle.spent(time.time()) + idle.reserve, idle.bill.whole(1, 0.0)) + 0.05
        said = other.type(
            "train", "NODES=1", f"SET=train.steps=100000 budget.max_usd={limit:.4f}", code=130
        )
        assert "of its budget.max_usd" in said
        assert run.read_results()["status"] == "stopped"

        said = other.type("ls")
        assert "cloudy: $" in said and two[0] in said
        said = other.type("clean", "PURGE=1", "YES=1")
        assert "no resources of cloudy are left in us-east-1" in said
        left = {thing.id: thing.kind for thing in account.living() if thing.id not in before}
        assert left == {} and all(
            account.things[id].state == thing.state for id, thing in before.items()
        )
