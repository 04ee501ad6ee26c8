"""Two users of one fleet: each has his own folder and key, neither enters the other's, and each sees that the other trains."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from fleet.lab import Lab
from trainfleet.run.run_folder import Run
from verbs import begin, enter, finish, write_text


def config(nodes: Lab, user: str, folder: str, steps: int, **fleet: object) -> str:
    return yaml.safe_dump({
        "name": "lm",
        "fleet": nodes.fleet(user, nodes=2, shared_folder=folder, **fleet),
        "data": {"name": "text", "sources": ["/fsx/text"], "vocab_size": 340, "validation_fraction": 0.1},
        "model": {"layers": 2, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
        "train": {"steps": steps, "precision": "fp32", "global_batch_size": 8, "sequence_length": 32, "log_every": 1,
                  "validate_every": 0, "validation_sequences": 8},
    })  # fmt: skip


def keys(nodes: Lab, node: int, user: str) -> list[str]:
    """The comments of the keys that may log in as this user."""
    path = nodes.root(node) / f"home/{user}/.ssh/authorized_keys"
    return (
        [line.split(None, 2)[2] for line in path.read_text().splitlines()] if path.exists() else []
    )


def public(nodes: Lab, user: str) -> str:
    return (nodes.root(0) / f"home/{user}/.ssh/id_trainfleet.pub").read_text().split()[1]


@pytest.mark.timeout(500)
def test_two_users_share_a_fleet_and_nothing_else(pair: Lab, tmp_path: Path) -> None:
    write_text(pair.shared / "text")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, user, shared, steps in (
        (first, "trainer", "/fsx/trainfleet", 3000),
        (second, "colleague", "/fsx/trainfleet", 12),
    ):
        folder.mkdir()
        (folder / "config.yaml").write_text(config(pair, user, shared, steps))
    enter(first, "setup")
    refused = enter(second, "setup", code=1)
    assert (
        "/fsx/trainfleet belongs to trainer" in refused
        and "fleet.shared_folder: /fsx/trainfleet-colleague" in refused
    )
    for words in (("train",), ("train", "NODES=1")):
        refused = enter(second, *words, code=1)
        assert (
            "/fsx/trainfleet belongs to trainer" in refused
            and "fleet.shared_folder: /fsx/trainfleet-colleague" in refused
        )
        assert "skipped" not in refused and "Traceback" not in refused, refused
    assert (pair.shared / "trainfleet").stat().st_uid == 4001
    assert not keys(pair, 0, "colleague") and not keys(pair, 1, "colleague")

    running = begin(first, "train")
    run = Run(pair.shared / "trainfleet/runs/lm")
    deadline = time.monotonic() + 240
    while sum(1 for _ in run.read_metrics()) < 20 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert time.monotonic() < deadline, running.communicate(timeout=1)
    (second / "config.yaml").write_text(config(pair, "colleague", "/fsx/trainfleet-colleague", 12))
    enter(second, "setup")
    refused = enter(second, "train", code=1)
    assert (
        "another run is using these hosts" in refused
        and "/fsx/trainfleet:lm (of trainer)" in refused
    )

    (second / "config.yaml").write_text(
        config(pair, "colleague", "/fsx/trainfleet-colleague", 12, exclusive=False)
    )
    finish(begin(second, "train"))
    assert "stopped" in enter(first, "stop")
    assert running.wait(30) == 130

    assert {path.stat().st_uid for path in (pair.shared / "trainfleet").rglob("*")} == {4001}
    assert {path.stat().st_uid for path in (pair.shared / "trainfleet-colleague").rglob("*")} == {
        4003
    }
    assert public(pair, "trainer") != public(pair, "colleague")
    for user, other in (("trainer", "colleague"), ("colleague", "trainer")):
        for node in range(2):
            admitted = (pair.root(node) / f"home/{user}/.ssh/authorized_keys").read_text()
            assert public(pair, user) in admitted and public(pair, other) not in admitted
