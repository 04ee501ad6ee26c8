"""A canary in a run that fails with it on real sshd nodes: found in no file of any machine, in no process list, in nothing said."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

import sabotage
import verbs
from fleet.lab import Lab
from fleet.test_launch import config


@pytest.mark.timeout(280)
def test_a_run_on_hosts_that_fails_with_a_secret_keeps_it(pair: Lab, tmp_path: Path) -> None:
    verbs.write_text(pair.shared / "text")
    sabotage.lay(pair.shared / "sabotage")
    python = pair.shared / "bin/python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:/fsx/sabotage" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    desk = tmp_path / "desk"
    desk.mkdir()
    (desk / "config.yaml").write_text(
        config(pair.fleet(secrets=list(sabotage.SECRETS), python="/fsx/bin/python"), "/fsx/text")
    )

    said = [verbs.enter(desk, "setup", variables=sabotage.SECRETS)]
    process, seen = verbs.begin(desk, "train", variables=sabotage.SECRETS), []
    while process.poll() is None:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):  # of this machine, and so of all nodes
            try:
                command = entry.read_bytes()
            except OSError:
                continue
            seen += [command for part in sabotage.NEVER if part in command]
        time.sleep(0.05)
    said.append(verbs.finish(process, code=1))
    assert "ValueError" in said[-1] and "***" in said[-1], said[-1]
    said += [verbs.enter(desk, verb, variables=sabotage.SECRETS) for verb in ("status", "logs")]

    run = pair.shared / "trainfleet/runs/launch"
    assert "401 for ***" in "".join(path.read_text() for path in run.rglob("*.jsonl")), (
        "the failure itself is not recorded"
    )
    assert (
        "***" in (run / "logs/node-1.log").read_text()
        and (desk / "runs/launch/results.json").exists()
    )
    assert (
        not [text for text in said for part in sabotage.NEVER if part.decode() in text] and not seen
    )
    assert sabotage.leaks(desk) == [] and sabotage.leaks(pair.shared) == []
    for node in range(2):
        for folder in ("root/.trainfleet", "root/.ssh", "tmp/trainfleet", "var/log"):
            assert sabotage.leaks(pair.root(node) / folder) == [], (node, folder)
