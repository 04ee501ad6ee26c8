"""Tokens/s and loss on one GPU beside a bare loop: `python tests/bench/bench_gpu.py [SHAPE ...] [--length 4096] [--steps 40]`.

Llama's shapes of 1, 3 and 8 billion, bf16 products over fp32 weights, compiled. Each is trained by our job, whole, and then by a loop
of torch alone on the same model; a shape that does not fit says so. To beat, for one H200: 1B 55,000, 3B 26,000, 8B 10,471
(KempnerForge's published figure; it keeps weights and moments in bf16). On a CPU `bench_gpu.py tiny --length 64 --steps 12` tries
the script itself.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import bench_train
import torch

from trainfleet import devices, models, runs
from trainfleet.config import Config, Settings, load

SHAPES = {"1b": ("llama-3.2-1b", 4), "3b": ("llama-3.2-3b", 2), "8b": ("llama-3-8b", 1), "tiny": ("tiny", 2)}  # micro-batch
WARM_UP = 5  # steps


def bare(config: Config, steps: int) -> tuple[float, float]:
    """Tokens/s and last loss of a loop of torch alone, on random tokens that are there already."""
    device, train = devices.current(), config.train
    place = device.torch_device
    model = models.build(config.model).to(place)
    model.initialize(1)
    for block in model.get_submodule(model.plan.blocks).children():
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    rows = torch.randint(0, 4096, (train.micro_batch, train.sequence_length + 1), device=place)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        with torch.autocast(device.kind, torch.bfloat16, enabled=device.native_bf16):
            loss = model(rows[:, :-1], targets=rows[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    return rows[:, 1:].numel() / statistics.median(seconds[WARM_UP:]), loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["1b", "3b", "8b"])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    told = parser.parse_args()
    bench_train.prepare(Path(tempfile.mkdtemp()))
    print(f"{devices.current().name}, torch {torch.__version__}")
    for shape in told.shapes:
        preset, size = SHAPES[shape]
        settings = (
            f"model.preset={preset} train.sequence_length={told.length} train.micro_batch={size} train.global_batch={size}"
            " train.compile=true train.learning_rate=3e-4"
        )
        try:
            speed = bench_train.ours(shape, 1, told.steps, settings)
            results = runs.run_of(shape).read_results()
            print(f"{shape}: ours {speed:,.0f} tokens/s, loss {results['final_loss']:.3f}, MFU {results['mfu']}", flush=True)
            config, _ = load(Settings(Path("config.yaml"), settings))
            print("{}: bare {:,.0f} tokens/s, loss {:.3f}".format(shape, *bare(config, told.steps)), flush=True)
        except (bench_train.Failed, torch.OutOfMemoryError) as error:
            print(f"{shape}: did not run: {error}", flush=True)


if __name__ == "__main__":
    main()
