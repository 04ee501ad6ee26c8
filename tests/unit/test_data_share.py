"""`make tokenize` as a node sees it: the same bytes for any number of nodes and processes, and after any interruption."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from requirement import need
from trainfleet.config.types import Data, Source
from trainfleet.data import dataset_store, encoders, manifest, sources, tokenize_worker, work_units
from trainfleet.data.dataset import Dataset, find
from trainfleet.data.dataset_store import is_busy, only_job, open_store
from trainfleet.data.progress import read_progress
from trainfleet.data.shards import verify
from trainfleet.data.tokenize_worker import Share, tokenize
from trainfleet.data.tokenizer import load
from trainfleet.health.lease import LEFT
from trainfleet.report import plots
from trainfleet.storage.files import LocalFiles
from trainfleet.trust.errors import DataError

ALONE = Share(0, 1, 1)
HOLD = """
import pathlib, sys, time
from trainfleet.data.dataset_store import is_busy, only_job
from trainfleet.storage.files import LocalFiles
with only_job(LocalFiles(pathlib.Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    monkeypatch.setattr(sources, "GRID", 2**16)
    folder = tmp_path / "text"
    folder.mkdir()
    words = [
        line
        for path in Path(__file__).parent.glob("*.py")
        for line in path.read_text().splitlines()
    ]
    lines = [json.dumps({"text": f"{i} " + "\n".join(words[i : i + 30])}) for i in range(400)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.txt").write_text("A plain text.\n" * 50)
    return Data("set", (str(folder),), "text", "bpe", 500, 0.1)


def content(folder: Path) -> dict[str, str]:
    """Hash of every file that a finished dataset consists of."""
    kept = [
        path for path in sorted(folder.rglob("*")) if path.parent.name not in ("progress", "terms")
    ]
    files = [path for path in kept if path.is_file() and path.name != "head.json"]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def all_nodes(data: Data, root: Path, nodes: int) -> None:
    """Every node's part in turn: node 0 first, since it prepares."""
    for node in range(nodes):
        tokenize(data, Share(node, nodes, 1), root)


def test_the_bytes_are_the_same_for_any_number_of_nodes(data: Data, tmp_path: Path) -> None:
    folders = []
    for nodes in (1, 2, 3, 5):
        all_nodes(data, tmp_path / str(nodes), nodes)
        folders.append(content(tmp_path / str(nodes) / "set"))
    assert all(folder == folders[0] for folder in folders)
    assert len([name for name in folders[0] if name.startswith("units/")]) > 3


def documented_index(path: Path) -> tuple[str, np.ndarray]:
    """The type of the ids and the length of every document, of an index that is to the last byte as Megatron-LM's format has it.

    Field by field: magic, version (u64), code of the type (u8), sequences (u64), bounds of documents (u64), lengths (i32), where
    each sequence begins in bytes (i64), and the first sequence of each document and their number last (i64).
    """
    content = path.read_bytes()
    magic, version, code, count, bounds = struct.unpack_from("<9sQBQQ", content)
    assert (magic, version, bounds) == (b"MMIDIDX\0\0", 1, count + 1)
    dtype = {4: "int32", 8: "uint16"}[code]
    plots = np.frombuffer(content, "<i4", count, 34)
    pointers = np.frombuffer(content, "<i8", count, 34 + 4 * count)
    documents = np.frombuffer(content, "<i8", bounds, 34 + 12 * count)
    assert pointers.tolist() == [
        int(plots[:i].sum()) * np.dtype(dtype).itemsize for i in range(count)
    ]
    assert (
        documents.tolist() == list(range(bounds)) and len(content) == 34 + 12 * count + 8 * bounds
    )
    return dtype, plots


def test_every_document_is_there_once_whole_and_ended(data: Data, tmp_path: Path) -> None:
    found = tokenize(data, ALONE, tmp_path)
    assert found is not None and found == find(data, tmp_path)
    tokenizer, texts = load(tmp_path / "set"), []
    for shard in found.shards:
        dtype, plots = documented_index(tmp_path / "set" / f"{shard.path}.idx")
        ids = np.fromfile(tmp_path / "set" / f"{shard.path}.bin", dtype)
        assert (len(plots), int(plots.sum()), int(plots.max())) == (
            shard.documents,
            shard.tokens,
            shard.longest,
        )
        assert (int(ids.min()), int(ids.max())) == (shard.min_id, shard.max_id)
        for part in np.split(ids, np.cumsum(plots)[:-1]):
            assert part[-1] == found.end_of_document
            texts.append(tokenizer.decode(part[:-1]))
    plan = sources.plan_units(data)
    assert sorted(texts) == sorted(
        document.text for unit in plan.units for document in work_units.read_unit(unit, "text")
    )
    assert 0.03 < found.validation_documents / found.documents < 0.2
    assert found.tokens + found.validation_tokens == sum(shard.tokens for shard in found.shards)
    assert found.checked > 0 and found.notes == ()


def test_a_restart_does_only_what_is_missing(data: Data, tmp_path: Path) -> None:
    tokenize(data, ALONE, tmp_path)
    whole, folder = content(tmp_path / "set"), tmp_path / "set"
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("units/*")}
    (folder / "manifest.json").unlink()
    (folder / "units" / "00001.json").unlink()  # killed between its files and its record
    (folder / "train" / "00002.bin").write_bytes(
        b"half"
    )  # a file that a crash of the machine cut off
    (folder / "train" / "00001.1.partial").write_bytes(b"half")  # what a killed process was writing
    tokenize(data, Share(0, 2, 1), tmp_path)
    tokenize(data, Share(1, 2, 1), tmp_path)
    assert content(folder) == whole
    redone = {
        path.name for path in folder.glob("units/*") if path.stat().st_mtime_ns != times[path.name]
    }
    assert redone == {"00001.json", "00002.json"} and not list(folder.rglob("*.partial"))


def test_a_second_run_of_a_finished_dataset_does_nothing(
    data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenize(data, ALONE, tmp_path)
    times = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "set").rglob("*")
        if path.name != "lock"
    }
    tokenize(data, ALONE, tmp_path)
    assert {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "set").rglob("*")
        if path.name != "lock"
    } == times
    assert "already finished" in capsys.readouterr().out


def test_another_setting_is_refused_when_finished_and_starts_again_when_not(
    data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenize(data, ALONE, tmp_path)
    other = dataclasses.replace(data, vocab_size=400)
    with pytest.raises(DataError, match=r"data\.tokenizer was `bpe 500`, is `bpe 400`"):
        find(other, tmp_path)
    (tmp_path / "set" / "manifest.json").unlink()
    assert find(other, tmp_path) is None
    finished = tokenize(other, ALONE, tmp_path)
    assert (
        finished
        and finished.vocabulary_size == 400
        and max(shard.max_id for shard in finished.shards) < 400
    )
    assert "starting again" in capsys.readouterr().out


def test_progress_adds_up_to_the_whole(data: Data, tmp_path: Path) -> None:
    assert read_progress(tmp_path / "set").bytes_total == 0
    tokenize(data, Share(0, 2, 1), tmp_path)
    half = read_progress(tmp_path / "set")
    assert 0 < half.bytes_done < half.bytes_total and not half.finished
    tokenize(data, Share(1, 2, 1), tmp_path)
    done, found = read_progress(tmp_path / "set"), find(data, tmp_path)
    assert (
        found
        and done.finished
        and done.bytes_done == done.bytes_total == sources.plan_units(data).bytes
    )
    assert (done.documents, done.tokens) == (
        found.documents,
        found.tokens + found.validation_tokens,
    )


def test_what_a_process_finds_is_raised_by_its_parent(data: Data, tmp_path: Path) -> None:
    tokenize(data, ALONE, tmp_path / "good")
    (Path(str(data.sources[0])) / "c.txt").write_bytes(b"caf\xe9 " * 2**16)
    bad = dataclasses.replace(data, tokenizer=str(tmp_path / "good" / "set" / "tokenizer.json"))
    with pytest.raises(DataError, match="is not valid UTF-8") as caught:
        tokenize(bad, Share(0, 1, 2), tmp_path / "bad")
    assert "c.txt:1" in str(caught.value)


def test_the_lengths_of_all_documents_are_drawn(data: Data, tmp_path: Path) -> None:
    need("matplotlib")
    found = tokenize(data, ALONE, tmp_path)
    assert found and sum(found.lengths) == found.documents == 401
    plots.draw_lengths("set", found, tmp_path / "set" / "lengths.png")
    assert (tmp_path / "set" / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert [plots._power(number) for number in (0, 9, 10, 17, 20)] == [
        "1",
        "512",
        "1k",
        "128k",
        "1M",
    ]


def test_two_jobs_on_one_dataset_are_refused(data: Data, tmp_path: Path) -> None:
    with only_job(LocalFiles(tmp_path / "set")), pytest.raises(DataError, match="another job"):
        tokenize(data, ALONE, tmp_path)


def test_a_frozen_job_loses_its_dataset_to_the_next_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock lives on, as that of a host whose power is gone does at a file server."""
    folder = tmp_path / "set"
    frozen = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert (
        frozen.stdout
        and frozen.stderr
        and frozen.stdout.readline() == b"held\n"
        and is_busy(folder)
    )
    frozen.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(dataset_store, "PATIENCE", 2.0)
    with only_job(LocalFiles(folder)):
        frozen.send_signal(signal.SIGCONT)
        assert frozen.wait(10) == LEFT and b"has taken over" in frozen.stderr.read()
    assert not is_busy(folder)


def test_a_node_with_other_files_is_refused(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_worker, "PATIENCE", 0.1)
    tokenize(data, Share(0, 2, 1), tmp_path)
    (Path(data.sources[0]) / "new.txt").write_text("only here")
    with pytest.raises(DataError, match="node 1 sees 3 files"):
        tokenize(data, Share(1, 2, 1), tmp_path)


def test_an_encoder_that_turns_out_wrong_is_replaced_and_named(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tokenize(data, ALONE, tmp_path / "right")

    class WrongLater(encoders.Fastokens):
        """Passes the check at the start and is wrong on longer texts, as a split bug of a real library was."""

        def encode(self, texts: list[str]) -> tuple[encoders.Ids, encoders.Offsets]:
            ids, offsets = super().encode(texts)
            return (ids[::-1] if any("dataclasses" in text for text in texts) else ids), offsets

    monkeypatch.setitem(encoders.ENCODERS, "fastokens", WrongLater)
    found = tokenize(data, ALONE, tmp_path / "wrong")
    assert right and found and found.identity == right.identity
    assert "encoded again with the reference" in found.notes[0]
    assert any(backend.startswith("tokenizers") for backend in found.backends)


def test_an_encoder_that_is_opened_anew_changes_nothing(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, opened = tokenize(data, ALONE, tmp_path / "whole"), list[str]()

    def counted(*arguments: object) -> tuple[encoders.TextEncoder, list[str]]:
        opened.append("")
        return real(*arguments)  # type: ignore[arg-type]

    real = encoders.open_encoder
    monkeypatch.setattr(encoders, "open_encoder", counted)
    monkeypatch.setattr(work_units, "RENEWED", 1)
    renewed = tokenize(data, ALONE, tmp_path / "renewed")
    assert whole and renewed and renewed.identity == whole.identity and renewed.notes == whole.notes
    assert len(opened) == len(sources.plan_units(data).units) > 1


def test_batches_do_not_depend_on_who_asks(data: Data, tmp_path: Path) -> None:
    tokenize(data, ALONE, tmp_path)
    dataset = Dataset.open(tmp_path / "set")
    length, n = 31, dataset.samples("train", 31)
    first = 2 * n - 24  # across the end of an epoch
    whole = dataset.batch("train", first, 48, length, seed=1)
    assert whole.shape == (48, 32) and whole.dtype == np.int64
    for world in (2, 3, 4, 8):
        part = 48 // world
        ranks = [
            dataset.batch("train", first + rank * part, part, length, seed=1)
            for rank in range(world)
        ]
        assert np.array_equal(np.concatenate(ranks), whole)
    assert not np.array_equal(whole, dataset.batch("train", first, 48, length, seed=2))


def test_an_epoch_reads_every_token_and_validation_is_in_order(data: Data, tmp_path: Path) -> None:
    found = tokenize(data, ALONE, tmp_path)
    dataset = Dataset.open(tmp_path / "set")
    assert found
    for split, total in (("train", found.tokens), ("validation", found.validation_tokens)):
        shards = [
            np.fromfile(tmp_path / "set" / f"{shard.path}.bin", found.dtype)
            for shard in found.split(split)
        ]
        row = np.concatenate(shards).astype(np.int64)
        n = dataset.samples(split, 100)
        assert n == (total - 1) // 100
        batch = dataset.batch(split, 0, n, 100, seed=3)
        expected = [row[k * 100 : k * 100 + 101] for k in range(n)]
        if split == "validation":
            assert np.array_equal(batch, np.stack(expected))
        else:
            assert not np.array_equal(batch, np.stack(expected))
            assert np.array_equal(
                batch[np.argsort(dataset.positions(split, 0, n, 100, seed=3)[1])],
                np.stack(expected),
            )


def test_opening_refuses_what_is_not_whole(data: Data, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no finished dataset"):
        Dataset.open(tmp_path / "set")
    found = tokenize(data, ALONE, tmp_path)
    assert found
    with pytest.raises(DataError, match="fewer than one sample of 1000000"):
        Dataset.open(tmp_path / "set").batch("train", 0, 1, 1_000_000, seed=1)
    with pytest.raises(DataError, match="token id is 499, but the model has 499"):
        Dataset.open(tmp_path / "set").check_vocabulary(499)
    Dataset.open(tmp_path / "set").check_vocabulary(500)


def test_opening_refuses_a_missing_a_shortened_and_another_file(data: Data, tmp_path: Path) -> None:
    tokenize(data, ALONE, tmp_path)
    for name, what in (
        ("train/00000.bin", "missing, or its length differs"),
        ("validation/00000.idx", "missing, or its length differs"),
        ("tokenizer.json", "is not the tokenizer|is missing"),
    ):
        path = tmp_path / "set" / name
        whole = path.read_bytes()
        Dataset.open(tmp_path / "set")
        if not name.endswith(".idx"):
            path.write_bytes(whole[:-2])
            with pytest.raises(DataError, match=what):
                Dataset.open(tmp_path / "set")
        path.unlink()
        with pytest.raises(DataError, match=what):
            Dataset.open(tmp_path / "set")
        path.write_bytes(whole)


def test_a_changed_byte_is_found_by_sampling_and_by_verifying(data: Data, tmp_path: Path) -> None:
    found, store = tokenize(data, ALONE, tmp_path), open_store(tmp_path / "set", None)
    assert found and len(list(verify(store, found))) == 2 * len(found.shards)
    for shard in found.shards:
        path = tmp_path / "set" / f"{shard.path}.bin"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged") as told:
        Dataset.open(tmp_path / "set")
    assert (
        told.value.next == f"rm -r {tmp_path / 'set'} && make tokenize"
    )  # nothing else is lost with it
    with pytest.raises(DataError, match=r"is damaged"):
        list(verify(store, found))


def test_weights_mix_the_sources_in_every_stretch(data: Data, tmp_path: Path) -> None:
    folder = data.sources[0]
    mixed = dataclasses.replace(
        data, sources=(Source(f"{folder}/a.jsonl", 3.0), Source(f"{folder}/c.txt", 1.0))
    )
    Path(folder, "c.txt").write_text("Something else.\n" * 400)
    found = tokenize(mixed, ALONE, tmp_path)
    dataset = Dataset.open(tmp_path / "set", mixed)
    assert found
    for first in (0, 5000):
        chosen, _ = dataset.positions("train", first, 4096, 64, seed=1)
        assert 0.72 < (chosen == 0).mean() < 0.78
    texts = [
        load(tmp_path / "set").decode(row) for row in dataset.batch("train", 0, 40, 64, seed=1)
    ]
    assert 2 < sum("Something else" in text for text in texts) < 25
    one_by_one = [dataset.batch("train", g, 1, 64, seed=1) for g in range(40)]
    assert np.array_equal(np.concatenate(one_by_one), dataset.batch("train", 0, 40, 64, seed=1))
    others = [
        mixed,
        dataclasses.replace(mixed, shuffle_window_mib=64),
        dataclasses.replace(mixed, sources=data.sources),
    ]
    assert len({Dataset.open(tmp_path / "set", other).identity for other in others}) == 3, (
        "a run is not to go on in another order"
    )
    assert Dataset.open(tmp_path / "set").identity == found.identity
    with pytest.raises(DataError, match="others do not"):
        sources.plan_units(
            dataclasses.replace(
                mixed, sources=(Source(f"{folder}/a.jsonl", 3.0), f"{folder}/c.txt")
            )
        )


NODE = """
import os, sys
from pathlib import Path
from trainfleet.config.types import Data, Source
from trainfleet.data import sources
from trainfleet.data.__main__ import *
from trainfleet.data.tokenize_worker import tokenize
if __name__ == "__main__":
    sources.GRID = 2**16
    exit_on(signal.SIGTERM)
    print(tokenize(Data("set", (sys.argv[1],), "text", "bpe", 500, 0.1), Share(0, 1, 3), Path(sys.argv[2])) is not None)
"""


def test_processes_give_the_same_bytes_and_stop_cleanly(data: Data, tmp_path: Path) -> None:
    tokenize(data, ALONE, tmp_path / "one")
    script = tmp_path / "node.py"
    script.write_text(NODE)
    arguments = [sys.executable, str(script), data.sources[0], str(tmp_path / "three")]
    environment = os.environ | {"PYTHONPATH": str(Path(manifest.__file__).parents[2])}
    process = subprocess.Popen(arguments, env=environment)
    while not (tmp_path / "three" / "set" / "plan.json").exists():
        time.sleep(0.01)
    process.terminate()
    assert process.wait(20) == 143
    assert not list((tmp_path / "three").rglob("*.partial"))
    assert subprocess.run(
        arguments, env=environment, capture_output=True, text=True
    ).stdout.endswith("True\n")
    assert content(tmp_path / "three" / "set") == content(tmp_path / "one" / "set")


def test_a_note_of_a_process_that_is_asked_to_stop_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(SystemExit):
        LocalFiles(tmp_path).write("progress/0-0.json", b"{}", durable=False)
    assert not list(tmp_path.rglob("*.*"))


FULL = """
import resource, sys
from pathlib import Path
from trainfleet.config.types import Data
from trainfleet.data import sources
from trainfleet.data.__main__ import *
if __name__ == "__main__":
    sources.GRID = 2**16
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
    try:
        tokenize(Data("set", (sys.argv[1],), "text", "bpe", 500, 0.1), Share(0, 1, 1), Path(sys.argv[2]))
    except TrainfleetError as error:
        sys.exit(str(error))
"""


def test_a_full_disk_is_named_and_leaves_nothing_half_written(data: Data, tmp_path: Path) -> None:
    """The kernel refuses to let a file grow, as it does on a full disk: in the middle of a shard."""
    whole = tokenize(data, ALONE, tmp_path / "whole")
    script = tmp_path / "full.py"
    script.write_text(FULL)
    environment = os.environ | {"PYTHONPATH": str(Path(manifest.__file__).parents[2])}
    arguments = [sys.executable, str(script), data.sources[0], str(tmp_path / "full"), "40000"]
    failed = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert (
        failed.returncode == 1
        and "can't write" in failed.stderr
        and "Traceback" not in failed.stderr
    ), failed.stderr
    assert (
        not list((tmp_path / "full").rglob("*.partial")) and find(data, tmp_path / "full") is None
    )
    again = tokenize(data, ALONE, tmp_path / "full")
    assert whole and again and again.identity == whole.identity


def test_a_very_long_document_stays_one_document(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tokenize(data, ALONE, tmp_path / "whole")
    monkeypatch.setattr("trainfleet.data.work_units.LONG", 500)
    monkeypatch.setattr("trainfleet.data.work_units.PART", 100)
    monkeypatch.setattr("trainfleet.data.documents.BATCH_BYTES", 1)
    monkeypatch.setattr("trainfleet.data.documents.in_batches.__defaults__", (1,))
    cut = tokenize(data, ALONE, tmp_path / "cut")
    assert whole and cut and cut.identity == whole.identity
