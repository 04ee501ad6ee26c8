"""The formula of config/goodput.py against the real watch, attempts and ledger on a clock that is not waited for.

    .venv/bin/python tests/bench/bench_goodput.py [DAYS [NODES]]

A row a size, from 96 to 80,000 devices that fail as published ones do; without DAYS so many that about sixty of them fail, and then
the 54 days of 16,384 H100 (Llama 3, arXiv:2407.21783, 3.3.4: 419 unexpected interruptions, over 90 % of useful time).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "unit"), str(Path(__file__).parents[2] / "python")]

from goodput_simulation import simulate  # noqa: E402

from trainfleet.config import Config, Settings, load  # noqa: E402
from trainfleet.config.goodput import foresee  # noqa: E402
from trainfleet.recipes import FOLDER  # noqa: E402
from trainfleet.run.run_folder import Run  # noqa: E402

STEP = 30.0  # seconds
SIZES = (12, 125, 1000, 2048, 5000, 10_000)
FAILURES = 60


def fleet_of(nodes: int) -> Config:
    """So many nodes of eight H100, and a model as large as fits on the fewest."""
    words = f"fleet.nodes={nodes} train.global_batch_size={8 * nodes} model.preset=llama-3-70b checkpoint.every=auto fleet.backend=slurm"
    return load(Settings(FOLDER / "llama-3-8b-p5.yaml", words))[0]


def tell(nodes: int, days: float) -> None:
    """A line of the table."""
    config, began = fleet_of(nodes), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        found = simulate(config, STEP, days, Run(Path(folder)))
    expected = foresee(config, STEP)
    print(f"{8 * nodes:8,} {days:6.1f} {found.restarts:9} {expected.interval / 60:8.0f} min {expected.share:9.2%} {found.share:10.2%}"
          f" {found.commands:9}   {time.process_time() - began:.0f} s", flush=True)  # fmt: skip


def main() -> None:
    print(" devices   days  restarts  checkpoint   formula  simulated  commands    CPU")
    told = float(sys.argv[1]) if len(sys.argv) > 1 else None
    for nodes in [int(sys.argv[2])] if len(sys.argv) > 2 else SIZES:
        tell(nodes, told or FAILURES * foresee(fleet_of(nodes), STEP).between_failures / 86400)
    if told is None:
        tell(2048, 54.0)


if __name__ == "__main__":
    main()
