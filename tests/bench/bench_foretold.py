"""Speed foretold after one `make profile`, beside what runs of several layouts then do on this machine.

    PYTHONPATH=python python tests/bench/bench_foretold.py [--folder FOLDER] [--steps 40] [--set SETTINGS]

Each layout of the default config (or of SETTINGS) is foretold as `make plan` does, with nothing measured and after the profile; then
each is trained for so many steps. To be run on an idle machine: a figure is the median of a run's logged steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYOUTS = {  # two nodes are played here, of one rank and one core each
    "2 data-parallel": "",
    "2 tensor": "train.parallelism.tensor=2",
    "2 pipeline": "train.parallelism.pipeline=2 train.micro_batch_size=2",
    "2 data-parallel, state over 2, ZeRO 3": "train.parallelism.fsdp=2 train.parallelism.zero_stage=3",
    "2 data-parallel, micro-batches of 1": "train.micro_batch_size=1",
    "1 rank of both cores": "fleet.nodes=1",
}
PLAIN = "train.log_every=1 train.validate_every=0 train.validation_sequences=8 checkpoint.every=never train.compile=false"


def enter(verb: str, settings: str) -> None:
    """Types the verb here."""
    subprocess.run(
        [sys.executable, "-m", "trainfleet", verb, f"SET={settings}"],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def foretold(settings: str) -> float:
    """Tokens/s as `make plan` says now."""
    from trainfleet.config import Settings
    from trainfleet.launch.calibration import experience_of
    from trainfleet.launch.command import config_of
    from trainfleet.plan.estimate import estimate

    config, _ = config_of(Settings(Path("config.yaml"), f"{PLAIN} {settings}"))
    seconds = estimate(config, None, experience_of(config)).seconds
    assert seconds
    return (
        config.train.steps * config.train.global_batch_size * config.train.sequence_length / seconds
    )


def trained(name: str, settings: str, steps: int) -> float:
    """Tokens/s of a run of so many steps, from its results."""
    enter("train", f"name={name} train.steps={steps} train.schedule_steps=1000 {PLAIN} {settings}")
    return float(json.loads(Path("runs", name, "results.json").read_text())["tokens_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="a folder with config.yaml and tokens; without it a new one is made",
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--set", default="", help="settings of all the layouts")
    parser.add_argument("--only", type=int, default=len(LAYOUTS), help="the first so many layouts")
    told = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT / "python")
    os.chdir(told.folder or tempfile.mkdtemp())
    if not Path("config.yaml").exists():
        Path("config.yaml").write_text((ROOT / "config.yaml").read_text())
    enter("tokenize", told.set)
    layouts = {name: f"{told.set} {settings}" for name, settings in [*LAYOUTS.items()][: told.only]}
    before = {name: foretold(settings) for name, settings in layouts.items()}
    enter("profile", f"{PLAIN} {told.set}")
    after = {name: foretold(settings) for name, settings in layouts.items()}
    found = {
        name: trained(f"foretold-{number}", layouts[name], told.steps)
        for number, name in enumerate(layouts)
    }
    print(f"{'tokens/s':38} {'unmeasured':>11} {'profiled':>9} {'run':>8} {'off by':>7}")
    for name in layouts:
        off = after[name] / found[name] - 1
        print(
            f"{name:38} {before[name]:11,.0f} {after[name]:9,.0f} {found[name]:8,.0f} {off:+7.1%}"
        )
    pairs = list(combinations(layouts, 2))
    right = sum((after[one] > after[other]) == (found[one] > found[other]) for one, other in pairs)
    print(f"order right in {right} of {len(pairs)} pairs")


if __name__ == "__main__":
    main()
