"""The mirror of a run folder: whatever is done to the folder there, the copy here becomes the same, and little is sent twice."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from trainfleet.config.host_list import Host
from trainfleet.hosts.host_results import HostFailure, Result
from trainfleet.hosts.mirror import Mirror
from trainfleet.hosts.transport import Transport
from trainfleet.run.run_folder import Run, write_atomic

HOST = Host("here", "127.0.0.1")


class Shell:
    """A transport without a way: what would run on a node runs in a shell here, and what comes back is counted."""

    def __init__(self) -> None:
        self.bytes = 0

    def ask(self, host: Host, command: str, *, timeout: float, stdin: str) -> Result | HostFailure:
        done = subprocess.run(
            ["sh", "-c", command],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        self.bytes += len(done.stdout)
        return Result(done.returncode, done.stdout, done.stderr, 0.0)


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Run, Mirror, Shell]:
    """The run there, the run here, and the mirror between them."""
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    shell, folder = Shell(), Path("runs/x")
    there = Run(tmp_path / "shared" / folder)
    there.logs.mkdir(parents=True)
    return (
        there,
        Run(folder),
        Mirror(cast(Transport, shell), str(tmp_path / "shared"), folder),
        shell,
    )


def alike(there: Run, here: Run) -> bool:
    def files(run: Run) -> dict[str, bytes]:
        paths = [path for path in run.folder.rglob("*") if path.is_file()]
        return {
            str(path.relative_to(run.folder)): path.read_bytes()
            for path in paths
            if "checkpoints" not in path.parts
        }

    return files(there) == files(here)


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


CHANGES: list[Callable[[Run], object]] = [
    lambda run: write_atomic(run.results, '{"status": "running"}'),
    lambda run: run.record("launched", nodes=2),
    lambda run: [run.record("checkpointed", step=step) for step in range(50)],
    lambda run: write_atomic(
        run.metrics, "".join(f'{{"step": {step}, "loss": 3.{step}}}\n' for step in range(40))
    ),
    lambda run: append(run.metrics, b'{"step": 40}\n'),
    # a resume: cut back, and grown beyond where it was, between two looks
    lambda run: write_atomic(
        run.metrics, "".join(f'{{"step": {step}, "loss": 4.{step}}}\n' for step in range(60))
    ),
    lambda run: write_atomic(run.results, '{"status": "finished"}'),
    lambda run: (run.logs / "node-0.log").write_bytes(bytes(range(256)) * 50000),
    lambda run: append(run.logs / "node-0.log", b"more\n"),
    lambda run: [
        (run.folder / "plots").mkdir(),
        (run.folder / "plots/loss.png").write_bytes(b"\x89PNG\r\n"),
    ],
    # the trace of a profile, more than one answer holds
    lambda run: [
        run.profile.mkdir(),
        (run.profile / "trace.json.gz").write_bytes(random.Random(1).randbytes((8 << 20) + 1)),
    ],
    lambda run: (run.folder / "stop").touch(),
    lambda run: (run.folder / "stop").unlink(),
]


@pytest.mark.thorough
def test_every_change_arrives(both: tuple[Run, Run, Mirror, Shell]) -> None:
    there, here, mirror, _ = both
    for number, change in enumerate(CHANGES):
        change(there)
        answer = mirror.refresh(HOST)
        assert isinstance(answer, float) and abs(answer - time.time()) < 60, answer
        assert alike(there, here), number


def test_all_at_once_arrives_too(both: tuple[Run, Run, Mirror, Shell]) -> None:
    there, here, mirror, _ = both
    for change in CHANGES:
        change(there)
    mirror.refresh(HOST)
    assert alike(there, here)


def test_only_what_is_new_is_sent(both: tuple[Run, Run, Mirror, Shell]) -> None:
    there, _, mirror, shell = both
    log = there.logs / "node-0.log"
    log.write_bytes(b"".join(f"{number**7}\n".encode() for number in range(100_000)))
    mirror.refresh(HOST)
    assert shell.bytes > 100_000
    for new in (b"", b"a line\n"):
        append(log, new)
        shell.bytes = 0
        mirror.refresh(HOST)
        assert shell.bytes < 500


def test_checkpoints_stay_where_they_are_and_the_config_is_each_side_s_own(
    both: tuple[Run, Run, Mirror, Shell],
) -> None:
    there, here, mirror, _ = both
    (there.checkpoints / "step-00000001").mkdir(parents=True)
    (there.checkpoints / "step-00000001" / "weights").write_bytes(b"x" * 1000)
    there.config.write_text("theirs")
    here.folder.mkdir(parents=True)
    here.config.write_text("ours")
    (here.folder / "notes.txt").write_text("mine")
    mirror.refresh(HOST)
    assert (
        not here.checkpoints.exists()
        and here.config.read_text() == "ours"
        and (here.folder / "notes.txt").exists()
    )


def test_a_folder_that_is_not_there_yet_is_an_empty_one(
    both: tuple[Run, Run, Mirror, Shell],
) -> None:
    there, here, mirror, _ = both
    there.logs.rmdir()
    there.folder.rmdir()
    assert isinstance(mirror.refresh(HOST), float) and not here.folder.exists()
