"""What is said to ranks and launchers by files of a run folder: whatever stands there is an order, none, or told of with its file."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreign.cases import watched
from foreign.folders import CONTENTS, KINDS, RAW, VALUES, encoded
from trainfleet.backends.base import HANDLE, REQUEST, Handle, load_job, save_job
from trainfleet.backends.local import Local
from trainfleet.cli import explained
from trainfleet.config import Settings
from trainfleet.health import fence, heartbeat
from trainfleet.health.fence import Attempt
from trainfleet.health.heartbeat import Instructions, NodeMemory
from trainfleet.health.heartbeat_format import HEAD, MAGIC, ROW, Beat, pack, read_beats
from trainfleet.health.lease import FILE, Holder, Vacancy, newest_holder, read_holder
from trainfleet.launch.command import config_of
from trainfleet.plan.job import Artifact, Job, Request, train_job
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import TrainfleetError

BEAT = Beat(0, 0, 7, 1, "step", 3, 0.5, 1.7e9, 0.1, 0.05)


def look(run: Run) -> None:
    """All that a launcher and a rank read of the orders of a run."""
    order = Local()
    for read in (
        lambda: fence.current(run.folder), lambda: fence.begin(run.folder), lambda: heartbeat.asked(run.folder), lambda: heartbeat.Stacks(run.folder, 0).read(),
        lambda: read_beats(run.folder, 1), lambda: read_holder(run.folder), lambda: newest_holder(run.folder), lambda: load_job(run),
        lambda: order.status(order.find(run)), lambda: order.stop(order.find(run), at_once=False),
    ):  # fmt: skip
        try:
            read()
        except (TrainfleetError, OSError) as error:
            told = explained(error) if isinstance(error, OSError) else error
            assert told and str(run.folder) in str(told) and "\x1b" not in str(told)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run of one node that an attempt, a launcher and a job have left. Who reads a lease that is damaged does not wait here."""
    monkeypatch.setattr("trainfleet.health.lease.time.sleep", lambda seconds: None)
    (tmp_path / "config.yaml").write_text("name: x\nfleet: {nodes: 1}\n")
    config, _ = config_of(Settings(tmp_path / "config.yaml"))
    run = Run(tmp_path / "runs" / "x")
    request = Request(train_job(config), (Artifact("node-0.sh", "#!/bin/sh\n"),))
    save_job(run, Handle("local", str(run.folder), request.token, 1), request)
    fence.begin(run.folder)
    for name, content in {FILE: json.dumps(asdict(Holder("here", 1, 3, 5.0))), "heartbeats/dump": "5.0", "logs/stacks-rank-0.txt": "x\n",
                          "nodes/node-0": f"4711 5 6 {request.token}\n", "nodes/node-0.exit": "0\n"}.items():  # fmt: skip
        (run.folder / name).parent.mkdir(exist_ok=True)
        (run.folder / name).write_text(content)
    (run.folder / "heartbeats/node-0").write_bytes(pack(0, 1, [BEAT]))
    return run


FILES = ("heartbeats/attempts/1", "heartbeats/attempts/1.taken", "heartbeats/attempt", "heartbeats/dump", "heartbeats/node-0", "logs/stacks-rank-0.txt", FILE,
         HANDLE, REQUEST, "nodes/node-0", "nodes/node-0.exit", "heartbeats/attempts/²", "heartbeats/attempts/٤", f"heartbeats/attempts/{'9' * 200}",
         "logs/stacks-rank-².txt", f"nodes/node-{'9' * 200}", "heartbeats/attempts", "heartbeats", "nodes", "logs")  # fmt: skip


def test_a_job_is_kept_whole(run: Run) -> None:
    found = load_job(run)
    assert found
    job = replace(
        found[1].job,
        image="registry.example/trainfleet:1",
        attempt=3,
        secrets=("A",),
        environment={"B": "c"},
        port=29500,
    )
    assert Job.of(job.record()) == job


def test_what_is_right_is_read(run: Run) -> None:
    assert fence.current(run.folder) == Attempt(1, 1) and heartbeat.asked(run.folder) == "5.0"
    assert read_beats(run.folder, 1) == {0: BEAT} and read_holder(run.folder) == Holder(
        "here", 1, 3, 5.0
    )
    found = load_job(run)
    assert found and found[0].nodes == 1 and found[0].token == found[1].token
    assert Local().status(Local().find(run)).exits == {0: 0}


@pytest.mark.parametrize("name", FILES)
def test_other_contents_and_other_files_are_an_order_none_or_told_of(run: Run, name: str) -> None:
    path, before = run.folder / name, run.folder.with_name("before")
    path.rename(before) if path.exists() else None
    for content in CONTENTS:
        if not before.is_dir():
            path.write_bytes(content)
            with watched():
                look(run)
            path.unlink(missing_ok=True)
    for kind, change in KINDS.items():
        if kind != "zeros" or before.is_file():
            path.parent.mkdir(exist_ok=True)
            change(path)
            with watched():
                look(run)
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(
                missing_ok=True
            )


@pytest.mark.parametrize("name", [HANDLE, REQUEST, FILE])
def test_each_key_of_another_kind_is_refused_with_its_name(run: Run, name: str) -> None:
    path = run.folder / name
    record: dict[str, Any] = json.loads(path.read_text())
    keys = [(key,) for key in record] + [("job", key) for key in record.get("job", ())]
    for key in keys:
        for value in (*VALUES, *RAW):
            path.write_bytes(encoded(record, key, value, None))
            try:
                read_holder(run.folder), load_job(run)
            except TrainfleetError as error:
                assert str(path) in str(error) and (
                    isinstance(value, bytes) or key[-1] in str(error)
                ), (key, value, str(error))
            else:
                kind = type(record[key[0]] if len(key) == 1 else record["job"][key[1]])
                fine = (
                    isinstance(value, kind)
                    or (kind is float and type(value) is int)
                    or value is None
                )
                assert fine or (kind is type(None) and type(value) is int), (key, value)


@pytest.mark.parametrize("row", [(2**32 - 1, 7, 3, 1, 0.0, 1.0, 0.0, 0.0), (0, 7, 3, 1, math.nan, 1.0, 0.0, 0.0), (0, 7, 3, 1, 0.0, math.inf, 0.0, 0.0), (0, 7, 99, 1, 0.0, 1.0, 0.0, 0.0)])  # fmt: skip
def test_a_beat_that_no_rank_leaves_is_none(run: Run, row: tuple[float, ...]) -> None:
    (run.folder / "heartbeats/node-0").write_bytes(HEAD.pack(MAGIC, 0, 1) + ROW.pack(*row))
    assert read_beats(run.folder, 1) == {}


FUZZ = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FUZZ
@given(raw=st.binary(max_size=200))
def test_any_bytes_are_beats_or_none(run: Run, raw: bytes) -> None:
    for head in (b"", HEAD.pack(MAGIC, 0, 1)):
        (run.folder / "heartbeats/node-0").write_bytes(head + raw)
        assert all(
            0 <= rank < 2**20 and math.isfinite(sum(beat[6:]))
            for rank, beat in read_beats(run.folder, 1).items()
        )


@FUZZ
@given(text=st.text(max_size=60) | st.integers().map(lambda number: json.dumps({"order": number})))
def test_any_order_is_a_number_or_none(run: Run, text: str) -> None:
    (run.folder / "heartbeats/attempts/1").write_text(text, errors="replace")
    assert 0 <= fence.current(run.folder).order <= 10**9


ORDERS: tuple[Callable[[Path], object], ...] = (
    lambda path: path.write_text("{"), lambda path: path.write_text('{"order": "x"}'), lambda path: path.write_text('{"order": 1, "lease": {"last": []}}'),
    lambda path: path.write_bytes(b"\xff" * 5000), lambda path: os.mkfifo(path), lambda path: path.write_text("[" * 1000), lambda path: path.mkdir(),
)  # fmt: skip


@pytest.mark.parametrize("harm", ORDERS)
def test_what_the_ranks_of_a_node_tell_each_other_is_not_believed_either(
    run: Run, harm: Callable[[Path], object]
) -> None:
    node = NodeMemory(run.folder, 0, 1)
    told = Instructions(3, 4, "x", Vacancy(1.0, True, 2.0), 5.0)
    node.write_instructions(told)
    assert node.read_instructions() == told
    (node.shared / "orders").unlink()
    harm(node.shared / "orders")
    assert node.read_instructions() == Instructions()
    node.forget()


def test_a_row_has_the_size_that_is_read() -> None:
    assert struct.calcsize("<4sII") == HEAD.size and len(pack(0, 1, [BEAT])) == HEAD.size + ROW.size
