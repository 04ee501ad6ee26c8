"""Run folders as training leaves them, made up: the report room is tested without training anything."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from trainfleet.run.run_folder import Run

START = 1_760_000_000.0
CONFIG = """\
name: {name}
fleet:
  backend: local
  nodes: 2
  ranks_per_node: 1
data:
  name: stdlib
  sources:
  - stdlib
  tokenizer: bpe
  vocab_size: 4096
model:
  preset: tiny
  family: llama
  layers: 4
  hidden_size: 192
  heads: 6
  kv_heads: 2
train:
  steps: {steps}
  global_batch_size: 16
  sequence_length: 256
  learning_rate: 0.003
  seed: 1
checkpoint:
  every: 100
  keep: 2
budget:
  max_usd: null
"""
BEGUN: dict[str, Any] = {
    "backend": "local",
    "nodes": 2,
    "world_size": 2,
    "device": "cpu",
    "layout": {"dp": 2, "fsdp": 1, "tp": 1, "pp": 1, "cp": 1},
    "model": {"family": "llama", "parameters": 3_212_544},
    "global_batch_sequences": 16,
    "sequence_length": 256,
    "mfu_formula": "MFU = tokens/s x FLOPs per token / (2 x 0.1664 TFLOP/s per rank)",
}
ENDED: dict[str, Any] = {
    "first_loss": 8.41,
    "tokens_per_second": 17312.0,
    "mfu": 0.312,
    "goodput": 0.7606,
    "seconds": {
        "startup": 27.1,
        "train": 118.2,
        "validate": 6.1,
        "checkpoint": 1.6,
        "total": 155.6,
        "loaded": 25.0,
        "met": 26.2,
        "built": 27.1,
        "first_step": 29.7,
        "tokenize": 21.4,
    },
    "restarts": 0,
    "started": START,
}
SAMPLE = {
    "prompt": "def ",
    "text": "read_lines(self, path):\n"
    '    """Return the lines of <path> & their numbers."""\n'
    "    with open(path) as file:\n"
    "        return list(file)",
}


def make_run(
    root: Path,
    *,
    name: str = "first-run",
    steps: int = 500,
    done: int | None = None,
    every: int = 5,
    status: str = "finished",
    **changes: Any,
) -> Run:
    """A run of `steps` steps that got to `done`, resumed at step 200 if it got there; `changes` go to results.json."""
    run = Run(root / name)
    run.folder.mkdir(parents=True)
    run.config.write_text(CONFIG.format(name=name, steps=steps))
    done = steps if done is None else done
    metrics = (
        [metric(step, steps) for step in range(min(every, done), done + 1, every)] if done else []
    )
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in metrics))
    run.record("launched", nodes=2, ranks_per_node=1)
    for step in range(100, done + 1, 100):
        run.record("checkpointed", step=step, seconds=0.31)
        if step == 200:
            run.record("resumed", step=step, world_size=2)
    ended = (
        ENDED | {"steps": done, "tokens": done * 4096, "final_loss": metrics[-1]["loss"]}
        if metrics
        else {}
    )
    if done >= 100:
        ended |= {
            "last_checkpoint": f"s3://bucket/{name}/step-{done // 100 * 100:08d}"
        }  # where checkpoint.path says
    if status == "finished":
        run.record("finished", step=done)
        ended |= {"sample": SAMPLE}
    run.update_results(name=name, status=status, **(BEGUN | ended | changes))
    return run


def metric(step: int, steps: int) -> dict[str, Any]:
    """One line of metrics.jsonl; a loss that falls as losses do, the same for the same step."""
    dice = random.Random(step)
    loss = 2.6 + 5.8 * math.exp(-step / 60) + 0.5 * math.exp(-step / 400) + dice.gauss(0, 0.05)
    speed = 17300 * (1 + dice.gauss(0, 0.03)) * (0.7 if step <= 5 else 1)
    line = {
        "step": step, "loss": loss, "tokens": step * 4096, "tokens_per_second": speed, "mfu": speed * 1.8e-5, "lr": 3e-3,
        "grad_norm": 1.2, "seconds": 4096 / speed, "memory_bytes": 812_000_000,
        "data_seconds": 0.0002, "forward_seconds": 0.3 * 4096 / speed, "backward_seconds": 0.6 * 4096 / speed, "optimizer_seconds": 0.01,
        "slowest_rank": int(dice.random() < 0.8), "slowest_own": 0.32 * 4096 / speed, "median_own": 0.3 * 4096 / speed,
    }  # fmt: skip
    return line | ({"valid_loss": loss + 0.12} if step % 50 == 0 else {})
