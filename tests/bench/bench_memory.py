"""The memory model against torch's allocator: a real step of the engine in each product of layouts, as one rank of a fake world of 8.

    .venv/bin/python tests/bench/bench_memory.py [WORDS]

A row a layout, of those whose settings have all the words: what config/memory.py reckons over what a step allocated at its fullest moment; then the median and the extremes.
Pipelines need real ranks (tests/distributed/test_memory_apart.py prints theirs).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "python")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from allocations import CONFIG, measure  # noqa: E402
from trainfleet.config import Settings, load  # noqa: E402
from trainfleet.config.limits import is_half  # noqa: E402
from trainfleet.config.memory import memory_of  # noqa: E402
from trainfleet.devices.cpu import Cpu  # noqa: E402
from trainfleet.engine.world import World  # noqa: E402

GPT2 = "model.family=gpt2 model.intermediate_size=1024 train.precision=bf16"
LAYOUTS = (
    "fleet.nodes=1 train.global_batch_size=8",
    "train.parallelism.fsdp=1",
    "train.parallelism.fsdp=2",
    "train.parallelism.fsdp=8",
    "train.parallelism.fsdp=8 train.parallelism.zero_stage=1",
    "train.parallelism.tensor=2",
    "train.parallelism.tensor=8",
    "train.parallelism.tensor=2 train.parallelism.fsdp=4",
    "train.parallelism.tensor=2 train.parallelism.fsdp=4 train.parallelism.zero_stage=1",
    "train.parallelism.context=2 train.parallelism.fsdp=4",
    "train.parallelism.context=4",
    "train.parallelism.context=2 train.parallelism.tensor=2 train.parallelism.fsdp=2",
)
KINDS = (
    "",
    "train.precision=bf16",
    "train.activation_checkpointing=full",
    "train.activation_checkpointing=selective",
    GPT2,
    f"{GPT2} train.param_dtype=bf16",
    "train.optimizer=muon",
)


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(CONFIG)
        for layout, kind in product(LAYOUTS, KINDS):
            settings = f"{layout} {kind}".strip()
            if not all(word in settings for word in sys.argv[1:]):
                continue
            try:
                config, _ = load(Settings(path, settings))
                reckoned = memory_of(config, is_half(config))
                _, peak = measure(config, World(0, config.world_size, 0, Cpu()))
            except Exception as error:  # a layout that is refused is no row
                print(f"{'refused':>8}  {settings}: {str(error).splitlines()[0][:90]}")
                continue
            ratios.append(reckoned.total / peak)
            parts = " ".join(
                f"{name}={value / 2**20:.1f}" for name, value in vars(reckoned).items()
            )
            print(
                f"{reckoned.total / peak:8.3f}  {settings}: {peak / 2**20:.1f} MiB; {parts}",
                flush=True,
            )
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    print(
        f"{len(ratios)} layouts: median {statistics.median(errors):.1%}, least {min(ratios):.3f}, most {max(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
