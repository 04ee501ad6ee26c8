"""What train.param_dtype: bf16 costs: `python tests/bench/bench_weights.py [STEPS]`, one process, one thread.

The 16.9M-parameter Llama of the other benchmarks on random tokens: CPU seconds of an optimizer step, in turns, medians. Then a small
model on the standard library, trained for so many steps (default 300) by our job in each format: its last losses.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from trainfleet import models
from trainfleet.config import Config, Settings, dump_resolved, load
from trainfleet.data.tokenize_worker import Share, tokenize
from trainfleet.devices.cpu import Cpu
from trainfleet.engine import __main__ as job
from trainfleet.engine import optimizer
from trainfleet.run import run_folder

CONFIG = """
name: weights
data: {name: text, sources: [stdlib], vocab_size: 1024}
fleet: {nodes: 1}
train: {steps: 300, global_batch_size: 8, sequence_length: 128, optimizer: adamw, precision: bf16, learning_rate: 1e-3, log_every: 1}
model: {preset: null, family: llama, layers: 3, hidden_size: 128, heads: 4, kv_heads: 4, intermediate_size: 352, vocab_size: 1024, max_position_embeddings: 256}
checkpoint: {every: never}
"""
LARGE = {
    "layers": 6,
    "hidden_size": 384,
    "heads": 6,
    "kv_heads": 6,
    "intermediate_size": 1024,
    "vocab_size": 8192,
}
TURNS = 7
KINDS = {
    "fp32, torch's fused AdamW": ("fp32", False),
    "bf16, as it is": ("bf16", False),
    "bf16, compiled": ("bf16", True),
}


def prepare(settings: str = "") -> Config:
    return load(Settings(Path("config.yaml"), settings))[0]


def time_steps(config: Config) -> None:
    made = {}
    for kind, (weights, compiled) in KINDS.items():
        model = models.build(replace(config.model, **LARGE))
        model.initialize(1)
        model.to(torch.bfloat16 if weights == "bf16" else torch.float32)
        made[kind] = (
            model,
            optimizer.build(
                model, replace(config.train, param_dtype=weights, compile=compiled), Cpu()
            ),
            [],
        )
    for turn in range(TURNS + 2):
        for model, update, seconds in made.values():
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            began = time.process_time()
            update.step()
            seconds += [time.process_time() - began] if turn > 1 else []
    for kind, (_, _, seconds) in made.items():
        print(f"{kind}: {statistics.median(seconds):.3f} s a step", flush=True)


def train(name: str, settings: str) -> None:
    config = prepare(f"name={name} {settings}")
    run = run_folder.run_of(name)
    run_folder.write_atomic(run.config, dump_resolved(config))
    assert job.main([str(run.folder)]) == 0
    losses = [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]
    print(
        f"{settings or 'fp32'}: last {statistics.mean(losses[-50:]):.4f}, validation {run.read_results()['valid_loss']:.4f}",
        flush=True,
    )


def main(steps: int) -> None:
    os.chdir(tempfile.mkdtemp())
    Path("config.yaml").write_text(CONFIG)
    config = prepare()
    torch.set_num_threads(1)
    time_steps(config)
    tokenize(config.data, Share(0, 1, 1))
    for name, settings in (("exact", ""), ("half", "train.param_dtype=bf16")):
        train(name, f"train.steps={steps} {settings}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
