"""make setup, tokenize and train on real sshd nodes: the losses of this machine's backend, and a secret that is nowhere to be found."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import yaml

from fleet.lab import Lab
from verbs import begin, finish, losses, write_text

CANARY = "canary-5d1f0c7e"


def config(backend: dict[str, object], text: str) -> str:
    return yaml.safe_dump({
        "name": "launch",
        "fleet": {"nodes": 2} | backend,
        "data": {"name": "text", "sources": [text], "vocab_size": 340, "validation_fraction": 0.1},
        "model": {"layers": 2, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
        "train": {"steps": 12, "precision": "fp32", "global_batch_size": 8, "sequence_length": 32, "log_every": 1, "validation_sequences": 8},
    })  # fmt: skip


def start(folder: Path, verb: str, *words: str) -> subprocess.Popen[str]:
    return begin(folder, verb, *words, variables={"THE_KEY": CANARY})


def seen_in_processes() -> list[str]:
    """Command lines of this machine, and so of all nodes, that hold the secret."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if CANARY.encode() in command:
            found.append(command.decode(errors="replace"))
    return found


def holds_canary(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and CANARY.encode() in path.read_bytes()
    ]


@pytest.mark.timeout(600)
def test_a_run_on_hosts_is_the_run_of_this_machine_and_keeps_its_secret(
    pair: Lab, tmp_path: Path
) -> None:
    text = write_text(pair.shared / "text")
    there, here = tmp_path / "there", tmp_path / "here"
    for folder, backend, source in (
        (there, pair.fleet(secrets=["THE_KEY"]), "/fsx/text"),
        (here, {"backend": "local"}, str(text)),
    ):
        folder.mkdir()
        (folder / "config.yaml").write_text(config(backend, source))

    outputs = [finish(start(there, verb)) for verb in ("setup", "plan", "tokenize")]
    pair.run(1, "sh", "-c", "TRAINFLEET_JOB=/fsx/trainfleet:other sleep 600 > /dev/null 2>&1 &")
    assert "node1: /fsx/trainfleet:other" in finish(start(there, "train"), code=1, timeout=60)
    pair.run(1, "pkill", "sleep")
    process, seen = start(there, "train"), []
    while process.poll() is None:
        seen += seen_in_processes()
        time.sleep(0.05)
    outputs += [finish(process), finish(start(there, "status")), finish(start(there, "train"))]
    assert "nothing to do" in outputs[-1]
    outputs += [
        finish(start(there, "scaling", "NODES=1 2", "STEPS=3")),
        finish(start(there, "profile")),
    ]
    assert "scaling.png" in outputs[-2] and "trace" in outputs[-1]
    assert (
        "continues to step" not in outputs[-2] + outputs[-1]
    )  # what only measures is not summed up as a run

    finish(start(here, "train"))
    assert (
        losses(there / "runs/launch") == pytest.approx(losses(here / "runs/launch"), rel=1e-4)
        and len(losses(there / "runs/launch")) == 12
    )

    assert not seen and not any(CANARY in output for output in outputs)
    assert not holds_canary(there) and not holds_canary(pair.shared)
    for node in range(2):
        assert not holds_canary(pair.root(node) / "root") and not holds_canary(
            pair.root(node) / "tmp" / "trainfleet"
        )

    run, data = pair.shared / "trainfleet/runs/launch", pair.shared / "trainfleet/data/text"
    kept = finish(start(there, "clean"))
    assert (
        "no process of launch is running on the fleet's 2 hosts" in kept
        and f"kept {run.relative_to(pair.shared)}" in kept.replace("/fsx/", "")
    )
    assert run.is_dir() and data.is_dir()
    finish(start(there, "clean", "PURGE=1", "YES=1"))
    assert not run.exists() and not data.exists() and not (there / "runs/launch").exists()
    pair.destroy(1)
    assert "node1" in finish(start(there, "clean"), code=1, timeout=60)
