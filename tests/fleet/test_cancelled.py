"""A launch on real sshd nodes that is still at its preflight: another machine's stop, clean and train see it, and cancel it or follow it."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fleet.lab import Lab
from verbs import begin, enter, finish, write_text

SLOWLY = """
import sys, time
from trainfleet.launch import remote_launch
seconds, fit_hosts = float(sys.argv.pop(1)), remote_launch.fit_hosts
remote_launch.fit_hosts = lambda *words: (time.sleep(seconds), fit_hosts(*words))[1]
from trainfleet.cli import main
sys.exit(main(sys.argv[1:]))
"""


def slowly(desk: Path, seconds: float) -> str:
    """Runs trainfleet in the place of `python -m trainfleet`, and waits before it surveys hosts."""
    (desk / "slowly.py").write_text(SLOWLY)
    path = desk / "python"
    path.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {desk}/slowly.py {seconds} "$@"\n')
    path.chmod(0o755)
    return str(path)


def desk(folder: Path, nodes: Lab) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({
        "name": "soon",
        "fleet": nodes.fleet(nodes=2),
        "data": {"name": "text", "sources": ["/fsx/text"], "vocab_size": 340, "validation_fraction": 0.1},
        "model": {"layers": 2, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
        "train": {"steps": 4, "precision": "fp32", "global_batch_size": 8, "sequence_length": 32, "log_every": 1, "validate_every": 0},
    }))  # fmt: skip
    return folder


def until(done: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(280)
def test_a_launch_at_its_gate_is_seen_and_cancelled_from_another_machine(
    pair: Lab, tmp_path: Path
) -> None:
    write_text(pair.shared / "text")
    here, elsewhere = desk(tmp_path / "here", pair), desk(tmp_path / "elsewhere", pair)
    enter(here, "setup")
    run = pair.shared / "trainfleet/runs/soon"

    for verb, words in (("stop", ()), ("clean", ("PURGE=1", "YES=1"))):
        if verb == "clean":  # the launch is a script's job in the background
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        launch = begin(here, "train", python=slowly(here, 900))
        until(lambda: (run / "head.json").exists())
        assert "the run is being launched: make train, typed by root" in enter(elsewhere, "status")
        said = enter(elsewhere, verb, *words, timeout=200)
        assert "asked the launch of soon to end: make train, typed by root" in said, said
        assert "stopped" in finish(launch, code=130, timeout=100)
        assert not pair.processes(0, "trainfleet.engine") and not (run / "results.json").exists()
        assert not (run / "head.json").exists() and not (run / "stop").exists()

    first = begin(here, "train", python=slowly(here, 10))
    until(lambda: (run / "head.json").exists())
    second = enter(elsewhere, "train")
    assert (
        "soon is already being launched: make train, typed by root" in second
        and "following it" in second
    )
    finish(first)

    shutil.rmtree(run)
    killed = begin(here, "train")
    until(lambda: (run / "head.json").exists())
    killed.kill()
    killed.communicate()
    said = enter(here, "train")
    assert (
        "this launch replaces make train, typed by root" in said and "its process has ended" in said
    )
