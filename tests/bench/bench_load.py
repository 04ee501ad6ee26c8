"""Loading: start-up, and the time of a batch in the full and the windowed order, of a dataset of 1e9 tokens that is made first.

python tests/bench/bench_load.py FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

PACKAGE = Path(__file__).parents[2] / "python"
sys.path.insert(0, str(PACKAGE))

from trainfleet.config.types import Data  # noqa: E402
from trainfleet.config.vocabulary import FILE  # noqa: E402
from trainfleet.data import manifest  # noqa: E402
from trainfleet.data.dataset import Dataset  # noqa: E402
from trainfleet.data.dataset_store import open_store  # noqa: E402
from trainfleet.data.manifest import DatasetSettings, Preparation, UnitRecord  # noqa: E402
from trainfleet.data.shards import ShardWriter  # noqa: E402

SHARDS, TOKENS, LENGTH, COUNT = 8, 125_000_000, 2048, 8
START = """
import sys, time; began = time.perf_counter(); sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy, trainfleet.data.dataset, trainfleet.data.shards; imported = time.perf_counter()
dataset = trainfleet.data.dataset.Dataset.open(Path(sys.argv[2])); opened = time.perf_counter()
dataset.batch("train", 10**9, 8, 2048, 1); first = time.perf_counter()
print(f"imports {imported - began:.3f} s, opening {opened - imported:.3f} s, the first batch, at sample 1e9, {first - opened:.3f} s")
"""


def make(folder: Path) -> None:
    """A dataset of random tokens, in documents of a thousand."""
    store, draw = open_store(folder, None), np.random.default_rng(0)
    definition = b'{"model": {"vocab": {"a": 0}}}'
    store.write(FILE, definition)
    preparation = Preparation(
        DatasetSettings((), "text", "none", 0.0),
        "",
        SHARDS,
        1,
        1,
        manifest.hashlib.sha256(definition).hexdigest(),
        32000,
        0,
        "uint16",
        few=False,
    )
    records = []
    for index in range(SHARDS):
        with ShardWriter(store, f"train/{index:05d}", "uint16", 0) as writer:
            for _ in range(TOKENS // 5_000_000):
                writer.add(
                    draw.integers(1, 32000, 5_000_000, np.uint32), np.arange(0, 5_000_001, 1000)
                )
            shard = writer.commit(0)
        records.append(
            UnitRecord(index, 0, preparation.identity, 1, 1, 1, "none", 0, (), shard, None)
        )
    manifest.write(store, manifest.MANIFEST, manifest.assemble(preparation, records, ()))


def main(folder: Path) -> None:
    if not (folder / manifest.MANIFEST).exists():
        make(folder)
    for _ in range(3):
        print(
            subprocess.run(
                [sys.executable, "-c", START, str(PACKAGE), str(folder)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout,
            end="",
        )
    plain = Data("set", (), "text", "none", 0, 0.0)
    for name, data in (("full", plain), ("windowed", replace(plain, shuffle_window_mib=256))):
        dataset = Dataset.open(folder, data)
        dataset.batch("train", 0, COUNT, LENGTH, 1)
        for turn in ("first time", "again"):  # the second time from the page cache
            began, cpu = time.perf_counter(), time.process_time()
            for step in range(1, 101):
                dataset.batch("train", step * COUNT, COUNT, LENGTH, 1)
            wall, cpu = (time.perf_counter() - began) / 100, (time.process_time() - cpu) / 100
            print(
                f"{name:>9}, {turn}: {wall * 1e3:.2f} ms a batch of {COUNT} x {LENGTH} ({COUNT * LENGTH / cpu / 1e6:.0f} Mtokens/CPU-s)"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
