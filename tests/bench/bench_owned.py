"""Published speeds of machines that are no EC2 type, foretold from a config that names them by fleet.accelerator alone.

    PYTHONPATH=python python tests/bench/bench_owned.py

Each row of the published files (a Llama that is a preset, on whole nodes, trained with this engine's means: FSDP, tensor ranks and
stages, without Megatron's kernels) becomes a config.yaml with its layout; what `make plan` foretells stands beside what was measured.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

from fit_planner import device_of, format_of, measured, work_of

from trainfleet.backends import terms_of
from trainfleet.config import Settings, load
from trainfleet.config.families import PRESETS
from trainfleet.plan.estimate import estimate
from trainfleet.trust.errors import ConfigError

HERE = Path(__file__).parent
FILES = ("published.jsonl", "unseen.jsonl", "unseen_second.jsonl", "unseen_third.jsonl")
NAMED = (
    ("GB200", "gb200"),
    ("B200", "b200"),
    ("H200", "h200"),
    ("H100", "h100"),
    ("A100", "a100"),
    ("4090", "rtx-4090"),
    ("A6000", "rtx-a6000"),
)
TUNED = re.compile(r"nemo|megatron|dgxc")  # with kernels that this engine does not have


def config_of(row: dict[str, Any]) -> str | None:
    """The config of a row; None where it is none that this engine could train."""
    work, told = work_of(row), row["hardware"] or ""
    name = next((name for word, name in NAMED if word in told), None)
    preset = next((name for name, shape in PRESETS.items() if work and (shape.layers, shape.hidden_size, shape.heads, shape.kv_heads,
                   shape.intermediate_size) == (work.layers, work.width, work.heads, work.kv_heads, work.inner)), None)  # fmt: skip
    if (
        work is None
        or name is None
        or preset is None
        or work.tuned
        or TUNED.search(row["source"].lower())
    ):
        return None
    found = device_of(told, row["source"].lower())
    node = min(found[1].node if found else 8, work.world)
    if work.world % node:
        return None
    size = re.search(r"-(\d+)GB", told)
    memory = f", memory_gib: {size[1]}" if size else ""
    gbps = (
        f", network: infiniband, network_gbps: {found[1].outside * node * 8 / 1e9:g}"
        if found
        else ""
    )
    layout = f"{{fsdp: {work.shard}, zero_stage: {work.zero}, tensor: {work.tensor}, pipeline: {work.pipeline}, context: {work.context}}}"
    return f"""name: row
fleet: {{backend: slurm, nodes: {work.world // node}, accelerator: {{name: {name}, per_node: {node}{memory}{gbps}}}}}
data: {{name: t, sources: [stdlib], tokenizer: bpe, vocab_size: 32000}}
model: {{preset: {preset}, max_position_embeddings: {max(work.length, 8192)}}}
train: {{steps: 1000, global_batch_size: {work.passes * work.micro_batch * work.data}, micro_batch_size: {work.micro_batch}, sequence_length: {work.length},
  activation_checkpointing: {work.recompute}, compile: {str(work.fused or format_of(row["precision"]) == "fp8").lower()}, precision: {format_of(row["precision"])}, parallelism: {layout}}}
"""


def foretold(text: str) -> float | None:
    """Tokens/s of a device as make plan says; None where the config is refused."""
    path = Path(tempfile.mkdtemp()) / "config.yaml"
    path.write_text(text)
    try:
        config, _ = load(Settings(path), terms_of)
    except ConfigError:
        return None
    seconds = estimate(config, None).seconds
    tokens = config.train.steps * config.train.global_batch_size * config.train.sequence_length
    return tokens / seconds / config.world_size if seconds else None


def main() -> None:
    found, refused = [], 0
    for row in (
        json.loads(line) for file in FILES for line in (HERE / file).read_text().splitlines()
    ):
        if row["kind"] != "train" or not (text := config_of(row)):
            continue
        work = work_of(row)
        if work is None or not (rate := measured(row, work)):
            continue
        if said := foretold(text):
            found.append((row["id"], said / rate - 1))
            print(f"{row['id'][:70]:72} {rate:9,.0f} {said:9,.0f} {said / rate - 1:+6.0%}")
        else:
            refused += 1
    errors = sorted(abs(error) for _, error in found)
    print(f"{len(found)} rows, {refused} refused: median {statistics.median(errors):.1%}, p90 {errors[int(0.9 * len(errors))]:.0%},"
          f" bias {statistics.median(error for _, error in found):+.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
