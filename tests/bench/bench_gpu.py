"""Speed, loss and memory on one GPU beside others, and what limited it: `python tests/bench/bench_gpu.py 1b 3b 8b`.

Llama's shapes of 1, 3 and 8 billion parameters at 4,096 tokens, products in bf16; 8B has weights and moments in bf16 too, as an fp32
AdamW of it leaves no room on one card. Each is trained by our job, whole, with the micro-batch and recomputation that the planner
chooses; then by a loop of torch alone: same model, blocks and loss compiled alike, same sequences, same learning rates, so that the
losses must come out the same; then by that loop with transformers' Llama, compiled. A table is printed, and each row is kept in
FOLDER/results.jsonl. --who ours,bare,transformers chooses.

--folder FOLDER keeps the dataset and what was compiled, so one shape a call will do, and the second call of a shape compiles nothing.
--set 'train.micro_batch_size=4 train.activation_checkpointing=full' tries other settings. On a CPU, `bench_gpu.py tiny tiny-half --steps 12` runs all of
this script, bf16 weights too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bench_train
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainfleet import devices, models
from trainfleet.config import Config, Settings, load
from trainfleet.config.memory import memory_of
from trainfleet.config.schedule import learning_rate
from trainfleet.config.sizes import flops_per_token
from trainfleet.data.dataset import Dataset
from trainfleet.engine import optimizer
from trainfleet.engine.batches import split
from trainfleet.run import run_folder

WARM_UP = 5  # steps of the bare loop that do not count: they compile


@dataclass(frozen=True)
class Shape:
    """What is trained, by how many sequences in a step; what others have published."""

    preset: str
    batch: int
    weights: str = "fp32"
    length: int = 4096
    aim: float = 0.0  # tokens/s on one H200
    published: str = ""

    @property
    def settings(self) -> str:
        return (
            f"model.preset={self.preset} train.sequence_length={self.length} train.global_batch_size={self.batch}"
            f" train.param_dtype={self.weights}"
            " train.precision=bf16 train.compile=true train.learning_rate=3e-4 checkpoint.every=never"
        )


SHAPES = {
    "1b": Shape(
        "llama-3.2-1b", 8, aim=55_000, published="38,535 a GPU: MPT 1B, 8 x H100 (llm-foundry)"
    ),
    "3b": Shape(
        "llama-3.2-3b", 4, aim=26_000, published="20,964 a GPU: MPT 3B, 8 x H100 (llm-foundry)"
    ),
    "8b": Shape(
        "llama-3-8b",
        2,
        "bf16",
        aim=11_500,
        published="10,471: one H200, bf16 weights, all recomputed, 80.7 GB (KempnerForge)",
    ),
    "tiny": Shape("tiny", 2, length=64),
    "tiny-half": Shape("tiny", 2, "bf16", length=64),
}
HEAD = ("shape", "who", "losses", "tokens/s", "MFU", "GiB", "where the time goes")


def ours(name: str, steps: int, settings: str) -> dict[str, Any]:
    """The figures of our job: its own results, and the shares of its steps' parts."""
    bench_train.ours(name, 1, steps, settings)
    run = run_folder.run_of(name)
    results, lines = run.read_results(), list(run_folder.read_lines(run.metrics))
    parts = {
        key.removesuffix("_seconds") for line in lines for key in line if key.endswith("_seconds")
    }
    spent = {
        part: statistics.median(
            line[f"{part}_seconds"] for line in lines[1:] if f"{part}_seconds" in line
        )
        for part in parts
    }
    shares = sorted(
        ((seconds / sum(spent.values()), part) for part, seconds in spent.items()), reverse=True
    )
    return {
        "losses": (results["first_loss"], results["final_loss"]),
        "speed": results["tokens_per_second"],
        "mfu": results["mfu"],
        "memory": max(line["memory_bytes"] for line in lines),
        "where": ", ".join(f"{part} {share:.0%}" for share, part in shares),
    }


Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of inputs and targets


def our_model(config: Config) -> tuple[torch.nn.Module, Losses]:
    """The model of our job, its blocks and its loss compiled."""
    model = models.build(config.model)
    model.initialize(config.train.seed)
    for block in model.get_submodule(model.plan.blocks).children():
        if config.train.activation_checkpointing == "full":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        block.compile(dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)  # type: ignore[method-assign]
    return model, lambda inputs, targets: model(inputs, targets=targets)


def transformers_model(config: Config) -> tuple[torch.nn.Module, Losses]:
    """Llama of transformers with the same shape, compiled; its own weights, so its losses are others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = config.model
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, intermediate_size=shape.intermediate_size,
        max_position_embeddings=config.train.sequence_length, tie_word_embeddings=shape.tie_word_embeddings, use_cache=False,
        attn_implementation="sdpa",
    ))  # fmt: skip
    if config.train.activation_checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logits = torch.compile(model, dynamic=False)
    return model, lambda inputs, targets: functional.cross_entropy(
        logits(input_ids=inputs).logits.flatten(0, 1).float(), targets.flatten()
    )


MODELS = {"bare": our_model, "transformers": transformers_model}


def bare(config: Config, who: str) -> dict[str, Any]:
    """The figures of a loop of torch alone, on the sequences and with the learning rates of our job."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(run_folder.COMPILED.absolute()))
    device, train = devices.nearest(), config.train
    place, format = device.torch_device, {"fp32": torch.float32, "bf16": torch.bfloat16}
    with place:
        model, losses = MODELS[who](config)
    model.to(format[train.param_dtype])
    groups = [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    groups += [
        {
            "params": [p for p in model.parameters() if p.ndim >= 2],
            "weight_decay": train.weight_decay,
        }
    ]
    update = torch.optim.AdamW(
        groups, betas=(train.beta1, train.beta2), eps=train.epsilon, fused=True
    )
    dataset, seconds, losses_told = (
        Dataset.open(run_folder.DATA / config.data.name, config.data),
        [],
        [],
    )
    for step in range(1, train.steps + 1):
        first, pieces = (
            (step - 1) * train.global_batch_size,
            train.global_batch_size // train.micro_batch_size,
        )
        whole = split(
            device.upload(
                dataset.batch(
                    "train", first, train.global_batch_size, train.sequence_length, train.seed
                )
            )
        )
        began = time.perf_counter()
        optimizer.set_learning_rate(update, learning_rate(train, step))
        loss = torch.zeros((), device=place)
        for inputs, targets in zip(
            whole.inputs.chunk(pieces), whole.targets.chunk(pieces), strict=True
        ):
            with torch.autocast(place.type, torch.bfloat16):
                part = losses(inputs, targets) / pieces
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.gradient_clip)
        update.step()
        update.zero_grad()
        device.synchronize()
        seconds.append(time.perf_counter() - began)
        losses_told.append(loss.item())
    speed = train.global_batch_size * train.sequence_length / statistics.median(seconds[WARM_UP:])
    load = flops_per_token(config.model, train.sequence_length) / device.peak_flops(torch.bfloat16)
    return {
        "losses": (losses_told[0], losses_told[-1]),
        "speed": speed,
        "mfu": round(speed * load, 4),
        "memory": device.memory_used(),
        "where": "",
    }


def apart(shape: str, who: str, settings: str) -> dict[str, Any]:
    """`bare` in a process of its own: so its memory is its own too."""
    done = subprocess.run(
        [sys.executable, __file__, "--apart", who, settings], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise bench_train.Failed(f"{who} of {shape} failed; its word is above")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def row(shape: str, who: str, found: dict[str, Any]) -> str:
    cells = (
        shape,
        who,
        " to ".join(f"{loss:.4f}" for loss in found["losses"]),
        f"{found['speed']:,.0f}",
        f"{found['mfu']:.1%}",
        f"{found['memory'] / 2**30:.1f}",
        found["where"],
    )
    return f"| {' | '.join(cells)} |"


def compare(shape: str, steps: int, extra: str, whom: list[str]) -> bool:
    """Prints and keeps a row for each of them, and what they are to be seen beside; whether all ran."""
    told = SHAPES[shape]
    settings = f"{told.settings} fleet.platform={devices.nearest().kind} {extra}"
    config, _ = load(Settings(Path("config.yaml"), settings))
    print(
        f"{shape}: {settings}; by arithmetic {memory_of(config, True).total / 2**30:.1f} GiB",
        flush=True,
    )
    name, well = f"{shape}-{int(time.time())}", True
    for who in whom:
        try:
            found = (
                ours(name, steps, settings)
                if who == "ours"
                else apart(shape, who, f"{settings} train.steps={steps}")
            )
        except bench_train.Failed as error:
            print(f"| {shape} | {who} | did not run: {error} |", flush=True)
            well = False
            continue
        print(row(shape, who, found), flush=True)
        run_folder.append_line(
            Path("results.jsonl"),
            {"shape": shape, "who": who, "settings": settings, "steps": steps, **found},
        )
    if told.aim:
        print(
            f"| {shape} | to reach, on one H200 | | {told.aim:,.0f} | | | published: {told.published} |",
            flush=True,
        )
    return well


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=["1b", "3b", "8b"], help=", ".join(SHAPES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--set", default="", help="more settings, as SET takes them")
    parser.add_argument(
        "--folder", type=Path, help="keeps the dataset, what was compiled, and the results"
    )
    parser.add_argument("--who", default="ours,bare,transformers")
    parser.add_argument("--apart", nargs=2, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if unknown := set(told.shapes) - SHAPES.keys():
        parser.error(f"no such shape: {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    if told.apart:
        who, settings = told.apart
        print(json.dumps(bare(load(Settings(Path("config.yaml"), settings))[0], who)))
        return
    folder = told.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    bench_train.prepare(
        folder, f"{Path(os.__file__).parent}/*.py"
    )  # some: what a text says does not matter here
    print(
        f"{devices.nearest().name}, torch {torch.__version__}, {told.steps} steps\n\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}"
    )
    ran = [compare(shape, told.steps, told.set, told.who.split(",")) for shape in told.shapes]
    sys.exit(not all(ran))


if __name__ == "__main__":
    main()
