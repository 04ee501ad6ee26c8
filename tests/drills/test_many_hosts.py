"""64 real sshd nodes: set up from a plain state, then seen unchanged in under ten seconds, with a dead and a slow one named; and what
each verb takes there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cockpit import Cockpit, pin

import verbs
from fleet.conftest import Run, lines, run
from fleet.lab import lab

__all__ = ["run"]
RANKS = 16  # of the 64 hosts train, and try their links: each loads torch, and all share this machine's cores and memory


@pytest.mark.timeout(200)
def test_sixty_four_hosts_are_seen_in_ten_seconds(run: Run, tell: Callable[[str], None]) -> None:
    with lab(64) as nodes:
        first = run(nodes, "setup")
        assert "64 of 64 hosts ready, 64 changed" in first.stdout, first.stdout + first.stderr

        began = time.monotonic()
        second = run(nodes, "setup")
        tell(f"64 hosts, nothing to do: {time.monotonic() - began:.1f} s")
        assert second.returncode == 0 and "64 of 64 hosts ready, 0 changed" in second.stdout
        assert time.monotonic() - began < 10

        nodes.cut(13)
        nodes.slow(21, "8kbit")
        began = time.monotonic()
        third = run(nodes, "setup")
        seconds = time.monotonic() - began
        tell(f"with one dead and one slow: {seconds:.1f} s")
        table = lines(third.stdout)
        assert "FAILED" in table["node13"] and "FAILED" in table["node21"], third.stdout
        assert "62 of 64 hosts ready" in third.stdout and third.returncode == 1
        assert seconds < 15  # 7 on two quiet cores, of which 6 are the slow host's


@pytest.mark.timeout(900)
def test_what_each_verb_takes_on_sixty_four_hosts(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    with lab(64) as nodes:
        verbs.write_text(nodes.shared / "text")
        pin(nodes)
        cockpit = Cockpit(nodes, tmp_path, "many", nodes=RANKS)
        some = Cockpit(nodes, tmp_path / "some", "some", nodes=RANKS, hosts=nodes.hosts()[:RANKS])
        for config in (cockpit.folder / "config.yaml", some.folder / "config.yaml"):
            config.write_text(
                config.read_text().replace("global_batch_size: 12", f"global_batch_size: {RANKS}")
            )
        for verb, says in (
            ("setup", "64 of 64 hosts ready, 64 changed"), ("setup", "64 of 64 hosts ready, 0 changed"),
            ("tokenize", ""), ("train", "step 20"), ("status", "finished"), ("clean", "no process of many is running on the fleet's 64 hosts"),
        ):  # fmt: skip
            began = time.monotonic()
            said = cockpit.type(verb, *["SET=train.steps=20"] * (verb == "train"), timeout=600)
            tell(f"64 hosts: make {verb} {time.monotonic() - began:.1f} s")
            assert says in said, said
        assert cockpit.results()["world_size"] == RANKS and not cockpit.leftovers()
        began = time.monotonic()
        said = some.type("doctor", timeout=600)  # its trial loads torch on every host
        tell(f"{RANKS} hosts: make doctor {time.monotonic() - began:.1f} s")
        assert f"all-reduce over {RANKS} nodes" in said, said
