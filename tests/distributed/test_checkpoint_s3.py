"""Checkpoints in S3: a real server of its protocol; what is large, cut off, failed, set aside or refused."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks

from s3server import Application, busy, serve
from trainfleet.checkpoints.store import CheckpointStore
from trainfleet.storage import s3
from trainfleet.storage.s3 import PART


class Server:
    """Where it is `busy`, one request in five is answered 503."""

    def __init__(self, application: Application) -> None:
        self.application, self.busy, self.refused, self.draw = (
            application,
            False,
            0,
            random.Random(1),
        )

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if not self.busy or self.draw.random() > 0.2:
            return self.application(environment, start)
        self.refused += 1
        return busy(start)


@pytest.fixture
def server() -> Iterator[Server]:
    made: list[Server] = []

    def wrap(application: Application) -> Application:
        made.append(Server(application))
        return made[0]

    with serve(wrap):
        yield made[0]


@pytest.fixture
def bucket(server: Server) -> CheckpointStore:
    return CheckpointStore("s3://bucket/some/run")


def uploads(bucket: CheckpointStore) -> list[dict[str, Any]]:
    return s3._pages("list_multipart_uploads", "Uploads", bucket.files.describe(""))


def test_large_files_go_in_parts_and_come_back(bucket: CheckpointStore) -> None:
    content = random.Random(1).randbytes(2 * PART + 1000)
    with bucket.create(4, "large") as stream:
        for first in range(0, len(content), 5_000_000):
            stream.write(content[first : first + 5_000_000])
    assert bucket.steps() == [] and bucket.size(4, "large") == len(content)
    bucket.commit(4, "marker")
    with bucket.open(4, "large") as stream:
        assert bucket.steps() == [4] and bucket.marker(4) == "marker" and stream.read() == content


def test_a_save_that_was_cut_off_leaves_nothing_that_costs_money(bucket: CheckpointStore) -> None:
    save = bucket.create(8, "large")
    save.__enter__().write(bytes(PART + 1))
    assert uploads(bucket)
    bucket.sweep()
    assert not uploads(bucket) and not s3.list_objects(bucket.files.describe(""))


def test_a_failed_upload_is_taken_back(bucket: CheckpointStore) -> None:
    with pytest.raises(ZeroDivisionError), bucket.create(8, "large") as stream:
        stream.write(bytes(PART + 1))
        raise ZeroDivisionError
    assert not uploads(bucket) and bucket.size(8, "large") is None


def test_what_is_set_aside_is_kept_until_it_is_removed(bucket: CheckpointStore) -> None:
    for step in (4, 8):
        with bucket.create(step, "part") as stream:
            stream.write(b"x")
        bucket.commit(step, "marker")
    bucket.set_aside(8)
    bucket.sweep()
    assert (bucket.steps(), bucket.broken(), bucket.size(8, "part")) == ([4], [8], 1)
    bucket.remove_broken(8)
    bucket.remove(4)
    assert not s3.list_objects(bucket.files.describe(""))


def test_a_sweep_does_not_rely_on_a_listing_alone(
    bucket: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket.create(4, "part") as stream:
        stream.write(b"x")
    bucket.commit(4, "marker")
    monkeypatch.setattr(bucket, "steps", list)  # a listing from before the commit
    bucket.sweep()
    assert bucket.size(4, "part") == 1


def test_a_refusal_for_good_names_the_object(server: Server) -> None:
    with (
        pytest.raises(OSError, match=r"(?s)s3://elsewhere/run/.*NoSuchBucket") as caught,
        CheckpointStore("s3://elsewhere/run").create(4, "part"),
    ):
        pass
    assert caught.value.errno == errno.EIO


@pytest.mark.timeout(900)
def test_a_fault_at_any_request_of_a_save_costs_that_save_at_most(tmp_path: Path) -> None:
    """Killed before and after each request, 503 once and for good: no marker without its files, and nothing left to pay for."""
    command = [sys.executable, str(Path(__file__).with_name("faults_s3.py")), str(tmp_path)]
    done = subprocess.run(
        command, env=ranks.environment(), capture_output=True, text=True, timeout=880
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["wrong"] == [] and told["cases"] >= 60
    names = [name.split(" ")[1] for name in told["requests"]]
    files = [
        at for at, name in enumerate(names) if name in ("rank-00000.safetensors", "index.json")
    ]
    marker = [
        at
        for at, request in enumerate(told["requests"])
        if names[at] == "committed.json" and not request.startswith("DELETE")
    ]
    assert max(files) < min(marker) and max(marker) < len(names) - 1, (
        "every file, then the marker, then what is old goes"
    )


def test_killed_between_saves_to_a_busy_server_it_goes_on_bit_for_bit(
    server: Server, tmp_path: Path
) -> None:
    here = Path.cwd()
    bench = ranks.Bench(tmp_path)
    unbroken, far = bench.train("unbroken", 2), {"checkpoint.path": "s3://bucket/far"}
    store, server.busy = CheckpointStore("s3://bucket/far/killed"), True
    process = bench.start(run := bench.prepare("killed", 2, **far), 2)
    ranks.await_that(lambda: bool(store.steps()), process)
    ranks.kill(process)
    bench.train("killed", 2, **far)
    os.chdir(here)
    assert server.refused > 10 and store.steps() == [16, 20] and not list(run.glob("checkpoints/*"))
    assert ranks.events(run, "resumed")[0]["step"] >= 4 and ranks.metrics(run) == ranks.metrics(
        unbroken
    )
    assert all(not store.damage(20, name, file) for name, file in store.read(20).files.items())
