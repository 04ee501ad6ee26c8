"""An image of a node that is set up: sealed when its snapshot begins, reachable again afterwards, and what the next machines are of."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from aws.account import Thing
from fleet.lab import lab
from fleet.test_cloud import Place, account_on, running

PRIVATE = (
    "root/.ssh/authorized_keys",
    "root/.netrc",
    "root/.trainfleet",
    "home/trainer/.history",
    "etc/ssh/ssh_host_rsa_key",
)
OPEN = ("root/notes", "etc/security/limits.d/90-trainfleet.conf")


@pytest.mark.timeout(600)
def test_an_image_has_no_keys_and_its_node_is_reached_again(tmp_path: Path) -> None:
    with lab(4) as nodes, account_on(nodes) as (account, metal, address):
        seen, booted = dict[str, set[str]](), list[Thing]()

        def look(instance: Thing) -> None:
            root = nodes.root(metal.node_of[instance.id])
            seen[instance.id] = {name for name in (*PRIVATE, *OPEN) if (root / name).exists()}

        account.on_snapshot, account.on_boot = look, booted.append
        place = Place(tmp_path / "laptop", address, nodes)
        assert "has no nodes in us-east-1" in place.type("image", code=1)
        place.type("setup", "NODES=2")
        two, root = running(account), nodes.root(1)
        for name in PRIVATE:
            if not (root / name).exists():
                (root / name).parent.mkdir(exist_ok=True)
                (root / name).write_text("secret\n")
        (root / "root/notes").write_text("mine\n")

        work = subprocess.Popen(
            [*nodes.enter(1), "env", "TRAINFLEET_JOB=/fsx/trainfleet:cloudy", "sleep", "1000"]
        )
        try:
            while not nodes.processes(1, "sleep"):
                time.sleep(0.05)
            said = place.type("image", code=1)
            assert (
                "the node is not idle" in said
                and "/fsx/trainfleet:cloudy is running" in said
                and not seen
            )
        finally:
            work.kill()
            work.wait()
        for pid in nodes.processes(1, "sleep"):
            subprocess.run(["kill", "-9", str(pid)], check=True)

        said = place.type("image")
        assert (
            seen == {two[1]: set(OPEN)}
            and not booted
            and f"{two[1]}" in said
            and "GiB snapshot: $" in said
        )
        assert all((root / name).exists() for name in PRIVATE)
        assert "2 of 2 hosts ready, 0 changed" in place.type("setup", "NODES=2")
        (image,) = (thing for thing in account.things.values() if thing.kind == "ami")
        assert f"{image.id} already has these versions" in place.type("image")

        place.type("clean", "YES=1")
        assert image.id in account.things and not running(account)
        place.type("setup", "NODES=2")
        assert {account.things[id].properties["ImageId"] for id in running(account)} == {image.id}
        assert "no resources of cloudy are left" in place.type("clean", "PURGE=1", "YES=1")
        assert not [thing for thing in account.living() if thing.kind in ("ami", "snapshot")]
