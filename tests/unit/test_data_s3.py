"""S3 as source and as store: a real server of its protocol that is busy one time in five, and says no for good when it should."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import chats
from s3server import Application, serve
from s3server import busy as refuse
from trainfleet.config import Config, Settings, dump_resolved, load
from trainfleet.config.types import Data
from trainfleet.data import dataset_store, local_copy, manifest, source_files, sources
from trainfleet.data.chat import ChatTemplate
from trainfleet.data.dataset import Dataset, find
from trainfleet.data.dataset_store import Claim
from trainfleet.data.progress import read_progress
from trainfleet.data.shards import verify
from trainfleet.data.sources import plan_units
from trainfleet.data.tokenize_worker import Share, tokenize
from trainfleet.node import entrypoint
from trainfleet.process.node_log import Log
from trainfleet.report.live import TokenizeLive
from trainfleet.run.run_folder import COPY, MOUNTED, Run, write_atomic
from trainfleet.storage import files, s3
from trainfleet.storage.files import LocalFiles
from trainfleet.trust.errors import DataError, S3Error

ALONE = Share(0, 1, 1)
CONDITIONS = ("HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH")


class Busy:
    """The server's application, answering 503 one time in five, or breaking the rule that a test sets."""

    def __init__(self, application: Callable[..., Any]) -> None:
        self.application, self.draw, self.refused, self.always = (
            application,
            random.Random(1),
            0,
            "",
        )
        self.conditions, self.lost = (
            set[str](),
            "",
        )  # of requests that put a lock; an object whose next answer is lost
        self.lock = threading.Lock()

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Any:
        with self.lock:
            self.conditions |= {
                name
                for name in CONDITIONS
                if name in environment and environment["PATH_INFO"].endswith("/lock")
            }
            busy = self.draw.random() < 0.2 or bool(
                self.always and self.always in environment["PATH_INFO"]
            )
            self.refused += busy
        if (
            not busy
            and self.lost
            and environment["PATH_INFO"].endswith(self.lost)
            and environment["REQUEST_METHOD"] == "PUT"
        ):
            self.lost, busy = "", True
            b"".join(self.application(environment, lambda *_: None))
        if not busy:
            return self.application(environment, start)
        return refuse(start)


@pytest.fixture(scope="module")
def server() -> Iterator[Busy]:
    made: list[Busy] = []

    def wrap(application: Application) -> Application:
        made.append(Busy(application))
        return made[0]

    with serve(wrap):
        yield made[0]


@pytest.fixture
def data(server: Busy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    server.always = ""
    monkeypatch.setattr(sources, "GRID", 2**16)
    monkeypatch.setattr(files, "RANGE", 2**14)
    words = Path(source_files.__file__).read_text().splitlines()
    lines = [
        json.dumps({"text": f"{i} " + "\n".join(words[i % 90 : i % 90 + 30])}) for i in range(300)
    ]
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.txt").write_text("A plain text.\n" * 50)
    for path in folder.iterdir():
        s3.write(f"s3://bucket/text/{path.name}", path.read_bytes())
    s3.write("s3://bucket/text/ignored.bin", b"\xff")
    return Data("set", ("s3://bucket/text",), "text", "bpe", 500, 0.1)


def test_a_prefix_gives_the_same_dataset_as_the_folder(
    data: Data, server: Busy, tmp_path: Path
) -> None:
    local = tokenize(replace(data, sources=(str(tmp_path / "text"),)), ALONE, tmp_path / "local")
    before = server.refused
    remote = tokenize(data, ALONE, tmp_path / "remote")
    assert local and remote and remote.identity == local.identity
    assert server.refused > before, "the server was busy in between"
    one = plan_units(replace(data, sources=("s3://bucket/text/b.txt",)))
    assert one.files == 1 and one.bytes == 700


def test_a_dataset_in_s3_is_made_found_and_read_like_one_on_disk(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = replace(data, sources=(str(tmp_path / "text"),), shuffle_window_mib=16)
    assert tokenize(local, ALONE, tmp_path / "local")
    remote = replace(local, tokenized_path="s3://bucket/sets", shuffle_window_mib=16)
    for node in range(3):  # nodes that share nothing but the bucket
        tokenize(remote, Share(node, 3, 1), tmp_path / f"node-{node}")
    found = find(remote, tmp_path / "elsewhere")
    assert found and found.identity == manifest.find(local, tmp_path / "local").identity  # type: ignore[union-attr]
    progress = read_progress(tmp_path / "elsewhere" / "set", remote.tokenized_path)
    assert progress.finished and progress.bytes_done == progress.bytes_total
    with TokenizeLive(tmp_path / "desk" / "set", remote.tokenized_path, out := io.StringIO()):
        pass
    assert "MB/s" in out.getvalue() and f"{progress.documents:,} documents" in out.getvalue()
    assert not list(tmp_path.glob("node-*/set/train/*")), "shards don't stay on the nodes"

    monkeypatch.setattr("trainfleet.data.dataset.BLOCK_BYTES", 2**14)
    here, there = (
        Dataset.open(root / "set", config)
        for root, config in ((tmp_path / "local", local), (tmp_path / "elsewhere", remote))
    )
    for first in range(0, 200, 20):
        assert np.array_equal(
            here.batch("train", first, 20, 64, 1), there.batch("train", first, 20, 64, 1)
        )
    assert list((tmp_path / "elsewhere" / "set" / "cache").iterdir())


def test_conversations_in_s3_are_read_like_those_on_disk(server: Busy, tmp_path: Path) -> None:
    server.always = ""
    model = chats.folder(tmp_path / "model")
    source = chats.write(tmp_path / "a.jsonl", [chats.record(n) for n in range(60)])
    local = chats.data_of(source, model, shuffle_window_mib=16)
    assert tokenize(local, ALONE, tmp_path / "local")
    remote = replace(local, tokenized_path="s3://bucket/chats")
    assert tokenize(remote, ALONE, tmp_path / "made")
    here, there = (
        Dataset.open(root / "chat", config)
        for root, config in ((tmp_path / "local", local), (tmp_path / "elsewhere", remote))
    )
    assert here.manifest.identity == there.manifest.identity
    assert np.array_equal(here.batch("train", 3, 9, 128, 1), there.batch("train", 3, 9, 128, 1))
    assert here.learned("train", 3, 9, 128, 1) == there.learned("train", 3, 9, 128, 1)
    assert ChatTemplate.read(there.folder) == replace(
        ChatTemplate.read(here.folder), where=str(there.folder / "tokenizer_config.json")
    )


@pytest.fixture
def run(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run that reads a dataset in S3 twice, in a folder of its own."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    (home / "given.yaml").write_text("name: x\n")
    config = load(Settings(home / "given.yaml"))[0]
    data = replace(
        data,
        name=f"set-{tmp_path.name}",
        sources=(str(tmp_path / "text"),),
        tokenized_path="s3://bucket/copied",
    )
    made = tokenize(data, ALONE, tmp_path / "made")
    assert made
    train = replace(
        config.train,
        steps=2 * made.tokens // (16 * 64) + 1,
        global_batch_size=16,
        sequence_length=64,
    )
    config = replace(config, data=data, train=train)
    write_atomic(Run(Path("runs/x")).config, dump_resolved(config))
    return config


def test_a_copy_on_a_node_s_own_disk_gives_the_same_batches(
    run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = local_copy.copy(run, tmp_path)
    streamed = Dataset.open(Path("data") / run.data.name, run.data)
    monkeypatch.setenv(MOUNTED, str(folder))
    copied = Dataset.open(Path("data") / run.data.name, run.data)
    assert copied.identity == streamed.identity and isinstance(copied.store, LocalFiles)
    assert len(list(verify(copied.store, copied.manifest))) == 2 * len(copied.manifest.shards)
    for first in range(0, 200, 20):
        assert np.array_equal(
            copied.batch("train", first, 20, 64, 1), streamed.batch("train", first, 20, 64, 1)
        )
    read, asked = s3.read_range, list[str]()
    monkeypatch.setattr(
        s3, "read_range", lambda address, *where: (asked.append(address), read(address, *where))[1]
    )
    assert local_copy.copy(run, tmp_path) == folder and not asked, "it is there already"
    (folder / "manifest.json").unlink()
    assert local_copy.copy(run, tmp_path) == folder
    assert asked and not [name for name in asked if name.endswith(".bin")], (
        "tokens that came before are not fetched again"
    )


def test_a_copy_is_on_the_disk_before_its_manifest(
    run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure leaves a manifest, and token files that are short or have holes."""
    fsync, synced = os.fsync, list[int]()
    monkeypatch.setattr(
        os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file))[1]
    )
    folder = local_copy.copy(run, tmp_path)
    inodes = {path.name: path.stat().st_ino for path in folder.rglob("*.*")}
    assert synced.index(inodes.pop("manifest.json")) >= max(map(synced.index, inodes.values()))


def test_a_copy_that_is_damaged_or_not_worth_it_is_none(
    run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="but this run reads only"):
        local_copy.copy(replace(run, train=replace(run.train, steps=1)), tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(DataError, match="are free"):
        local_copy.copy(run, tmp_path)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    found = s3.list_objects(f"s3://bucket/copied/{run.data.name}/train/")
    name = next(one.address for one in found if one.address.endswith(".bin"))
    content = bytearray(s3.read(name) or b"")
    content[7] ^= 1
    s3.write(name, bytes(content))
    with pytest.raises(DataError, match="is damaged"):
        local_copy.copy(run, tmp_path)
    assert not list(tmp_path.glob("trainfleet/*/*/manifest.json"))


def test_a_node_says_where_its_dataset_is(
    run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, log = (
        entrypoint.parse(["--on", "fleet", "--folder", "runs/x", "--ranks", "1", "--", "m"]),
        Log(tmp_path / "log"),
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(entrypoint.__file__).parents[2]))
    monkeypatch.delenv(MOUNTED, raising=False)
    entrypoint.copy_dataset(order, log)
    monkeypatch.setenv(COPY, str(tmp_path))
    entrypoint.copy_dataset(order, log)
    assert MOUNTED not in os.environ and "is not a mounted disk" in log.path.read_text()
    monkeypatch.setenv(COPY, "/dev/shm")
    try:
        entrypoint.copy_dataset(order, log)
        assert (
            Path(os.environ[MOUNTED], "manifest.json").exists()
            and "copied the dataset to this node's disk" in log.path.read_text()
        )
    finally:
        shutil.rmtree(Path("/dev/shm/trainfleet") / run.data.name, ignore_errors=True)


def test_of_two_jobs_on_two_machines_one_is_refused(
    data: Data,
    server: Busy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dataset_store, "RENEW", 0.05)
    monkeypatch.setattr(dataset_store, "POLL", 0.1)
    remote = replace(data, name="contested", tokenized_path="s3://bucket/sets")
    store, other = manifest.store_of(remote, tmp_path / "here"), tmp_path / "there"
    with dataset_store.only_job(store), pytest.raises(DataError, match="another job is tokenizing"):
        tokenize(remote, ALONE, other)
    assert f"(process {os.getpid()}, claim" in capsys.readouterr().out
    assert server.conditions == set(CONDITIONS), "who comes second is decided by the server"
    assert tokenize(remote, ALONE, other), "what is let go can be had"
    assert not s3.list_objects("s3://bucket/sets/contested/lock")


def test_the_claim_of_a_job_that_died_lapses(server: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    address = "s3://bucket/died/lock"
    assert s3.write_if(address, b"0123 host (process 1, claim 1)", "")
    monkeypatch.setattr(dataset_store, "LAPSE", 3600.0)
    with Claim(address, "0123"):  # whoever wrote that had the lock that is held now
        pass
    assert s3.write_if(address, b"0123 host (process 1, claim 1)", "")
    monkeypatch.setattr(dataset_store, "LAPSE", 0.2)
    monkeypatch.setattr(dataset_store, "POLL", 0.05)
    with Claim(address, "4567"):
        assert s3.read(address).startswith(b"4567 ")  # type: ignore[union-attr]


def test_a_claim_whose_answer_was_lost_is_known_again(
    server: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_store, "LAPSE", 3600.0)
    server.lost = "/lost/lock"
    with Claim("s3://bucket/lost/lock", "0123"):
        assert not server.lost


def test_a_renewal_whose_answer_was_lost_is_a_renewal(
    server: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, address = threading.Event(), "s3://bucket/renewed/lock"
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    monkeypatch.setattr(dataset_store, "RENEW", 0.05)
    try:
        with Claim(address, "0123"):
            server.lost = "/renewed/lock"
            assert not stopped.wait(1) and not server.lost
    finally:
        signal.signal(signal.SIGTERM, before)
    assert s3.read(address) is None


def test_a_job_that_was_taken_for_dead_stops(
    server: Busy, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    monkeypatch.setattr(dataset_store, "RENEW", 0.05)
    try:
        with Claim("s3://bucket/slow/lock", "0123"):
            s3.write("s3://bucket/slow/lock", b"4567 another")
            assert stopped.wait(30)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "another job is tokenizing" in capfd.readouterr().err
    assert s3.read("s3://bucket/slow/lock") == b"4567 another", "it leaves the other's claim alone"


def test_a_block_that_was_changed_in_s3_is_refused(data: Data, tmp_path: Path) -> None:
    remote = replace(data, name="changed", tokenized_path="s3://bucket/sets")
    found = tokenize(remote, ALONE, tmp_path)
    assert found
    for shard in found.split("train"):
        address = f"s3://bucket/sets/changed/{shard.path}.bin"
        content = bytearray(s3.read(address) or b"")
        content[len(content) // 2] ^= 1
        s3.write(address, bytes(content))
    with pytest.raises(DataError, match="is damaged"):
        Dataset.open(tmp_path / "changed", remote).batch("train", 0, 200, 64, 1)


def full(path: Path, target: Path, replace: Callable[[Path, Path], Path] = Path.replace) -> Path:
    """Path.replace on a disk that is full for the cache."""
    if path.parent.name == "cache":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return replace(path, target)


def test_a_node_s_tokenizer_of_an_earlier_dataset_is_replaced(data: Data, tmp_path: Path) -> None:
    remote = replace(data, name="remade", tokenized_path="s3://bucket/sets")
    assert tokenize(remote, ALONE, tmp_path / "made")
    own = tmp_path / "here/remade/tokenizer.json"
    Dataset.open(own.parent, remote)
    good = own.read_bytes()
    own.write_bytes(good.replace(b'"', b' "', 1))
    Dataset.open(own.parent, remote)
    assert own.read_bytes() == good


@pytest.mark.parametrize("left", [b"", bytes(2000), None], ids=["empty", "zeros", "full disk"])
@pytest.mark.filterwarnings("default")
def test_a_cache_that_a_crash_or_a_full_disk_spoiled_gives_the_same_tokens(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bytes | None
) -> None:
    remote = replace(data, name="spoiled", tokenized_path="s3://bucket/sets")
    assert tokenize(remote, ALONE, tmp_path / "made")
    good, folder = Dataset.open(tmp_path / "made/spoiled", remote), tmp_path / "here/spoiled"
    rows = good.batch("train", 0, 20, 64, 1)
    if left is None:
        monkeypatch.setattr(Path, "replace", full)
        with pytest.warns(UserWarning, match="can't cache dataset blocks: No space left"):
            assert np.array_equal(Dataset.open(folder, remote).batch("train", 0, 20, 64, 1), rows)
        assert not [*(folder / "cache").iterdir()]
        return
    assert np.array_equal(Dataset.open(folder, remote).batch("train", 0, 20, 64, 1), rows)
    for path in (blocks := [*(folder / "cache").iterdir()]):
        path.write_bytes(left)
    assert np.array_equal(Dataset.open(folder, remote).batch("train", 0, 20, 64, 1), rows)
    assert blocks and left not in [path.read_bytes() for path in blocks], "they are mended"


def test_the_cache_stays_within_its_limit(tmp_path: Path) -> None:
    from trainfleet.data.shards import BlockCache

    cache, fetched = BlockCache(tmp_path, 5000), list[int]()

    def block(i: int) -> bytes:
        fetched.append(i)
        return bytes([i]) * 1000

    for i in [0, 1, 2, 3, 0, 4, 0, 5, 0]:
        name = f"{i}-{zlib.crc32(bytes([i]) * 1000)}"
        assert cache.get(name, lambda i=i: block(i))() == bytes([i]) * 1000  # type: ignore[misc]
    assert fetched == [0, 1, 2, 3, 4, 5], "what is used stays"
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5000


def test_what_s3_refuses_for_good_is_named(data: Data, server: Busy, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="s3://bucket/nothing"):
        plan_units(replace(data, sources=("s3://bucket/nothing",)))
    with pytest.raises(S3Error, match="S3 refused") as caught:
        plan_units(replace(data, sources=("s3://gone/text",)))
    assert "s3://gone/text" in str(caught.value) and "the bucket does not exist" in str(
        caught.value
    )
    server.always = "a.jsonl"
    with pytest.raises(S3Error, match="S3 refused") as caught:
        tokenize(data, ALONE, tmp_path)
    assert (
        "a.jsonl" in str(caught.value)
        and "SlowDown" in str(caught.value)
        and "10 times" in str(caught.value)
    )


def test_an_object_that_changes_meanwhile_is_refused(data: Data, tmp_path: Path) -> None:
    unit = plan_units(data).units[0]
    s3.write("s3://bucket/text/a.jsonl", b'{"text": "other"}\n' * 5000)
    from trainfleet.data.documents import read_unit

    with pytest.raises(S3Error, match="S3 refused") as caught:
        list(read_unit(unit, "text"))
    assert "the object has changed since it was listed" in str(caught.value)
