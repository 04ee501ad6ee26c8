"""What a checkpoint costs: `python tests/bench/bench_checkpoint.py stall|save|resume ...`, beside torch.save and PyTorch's async_save.

stall tiny|large [ROUNDS] [RANKS]
    Blocks of ten steps of our trainer take turns: with no save, with one of ours, with torch.save (and its fsync), with
    torch.distributed.checkpoint's async_save; each save begins after the first step of its block and may go on until its end. The
    figures are medians over the rounds: what a block takes longer than the one without a save in the same round, and how long
    the call itself holds training up. tiny is the default run's model and batch, large 30M parameters on few tokens.

save [GIGABYTES] [ROUNDS]
    Seconds of a save of so many GB from its call until it is committed, and CPU seconds of it.

resume [GIGABYTES]
    Seconds until a state of so many GB is back in a model and its optimizer, with the files out of the page cache and in it.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from trainfleet import devices
from trainfleet.config import Config, Settings, load
from trainfleet.data.dataset import Dataset
from trainfleet.data.tokenize_worker import Share, tokenize
from trainfleet.engine.checkpoint import Checkpoints, TrainingProgress
from trainfleet.engine.parallel.rank_model import TorchParts
from trainfleet.engine.timing import Stopwatch
from trainfleet.engine.trainer import Trainer
from trainfleet.engine.world import World, join
from trainfleet.run import run_folder
from trainfleet.run.run_folder import Run

BLOCK = 10  # steps
CONFIGS = {
    "tiny": "",
    "large": "model: {layers: 8, hidden_size: 512, heads: 8, kv_heads: 8, intermediate_size: 1408}\n"
    "train: {sequence_length: 128, global_batch_size: 2, precision: fp32}\n",
}
Saver = Callable[
    [Trainer, int], Callable[[], object]
]  # begins a save; what it gives back returns when the save is done


def ours(trainer: Trainer, step: int) -> Callable[[], object]:
    trainer.checkpoints.save(trainer.parts, TrainingProgress(step), 0.0)
    return trainer.checkpoints.settle


def with_torch_save(trainer: Trainer, step: int) -> Callable[[], object]:
    """By rank 0, as most loops have it; the others wait."""
    if trainer.world.first:
        write(
            "plain.pt",
            {
                "model": trainer.parts.model.state_dict(),
                "optimizer": trainer.parts.optimizer.state_dict(),
            },
        )
    dist.barrier()
    return lambda: None


def write(path: str, state: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())


def with_async_save(trainer: Trainer, step: int) -> Callable[[], object]:
    model, optimizer = get_state_dict(trainer.parts.model, trainer.parts.optimizer)
    saving = state_dict_saver.async_save(
        {"model": model, "optimizer": optimizer},
        checkpoint_id=f"dcp-{step % 2}",
        process_group=LINE[0],
    )
    assert isinstance(saving, Future)
    return saving.result


LINE: list[dist.ProcessGroup] = []  # of async_save, apart from training's
SAVERS: dict[str, Saver | None] = {
    "never": None,
    "ours": ours,
    "torch.save": with_torch_save,
    "async_save": with_async_save,
}


def stall(name: str, rounds: int) -> None:
    """On each rank; rank 0 prints."""
    config, _ = load(Settings(Path("config.yaml")))
    with join(devices.nearest()) as world:
        LINE.append(dist.new_group(backend="gloo"))
        dataset = Dataset.open(run_folder.DATA / config.data.name, config.data)
        checkpoints = Checkpoints(Run(Path("runs/bench")), config, dataset.identity, world)
        trainer = Trainer(config, dataset, world, checkpoints, Stopwatch(time.time()))
        step, whole, calls = (
            0,
            {name: list[float]() for name in SAVERS},
            {name: list[float]() for name in SAVERS},
        )
        for _ in range(rounds + 1):
            for method, saver in SAVERS.items():
                dist.barrier(group=world.hosts)
                began, done = time.perf_counter(), None
                for place in range(BLOCK):
                    step += 1
                    trainer.advance(step)
                    if place == 0 and saver:
                        called = time.perf_counter()
                        done = saver(trainer, step)
                        calls[method].append(time.perf_counter() - called)
                if done:
                    done()
                dist.barrier(group=world.hosts)
                whole[method].append(time.perf_counter() - began)
        if world.first:
            size = sum(
                file.stat().st_size
                for file in next(Path("runs/bench/checkpoints").glob("step-*")).iterdir()
            )
            tell(name, config, size, whole, calls)


def tell(
    name: str,
    config: Config,
    size: int,
    whole: dict[str, list[float]],
    calls: dict[str, list[float]],
) -> None:
    """The first round, in which everybody takes memory and plans, is left out."""
    never = whole["never"][1:]
    step = statistics.median(never) / BLOCK
    print(
        f"{name}: {size / 1e6:.0f} MB, {config.world_size} ranks, {len(never)} rounds, a step {step:.4f} s"
    )
    for method in list(SAVERS)[1:]:
        extra = sorted(one - other for one, other in zip(whole[method][1:], never, strict=True))
        middle, low, high = (
            statistics.median(extra),
            extra[len(extra) // 4],
            extra[len(extra) * 3 // 4],
        )
        call = statistics.median(calls[method][1:])
        print(
            f"  {method:<11} costs {middle:+.3f} s ({low:+.3f} to {high:+.3f}) = {middle / step:.2f} steps"
            f" = {middle / step:.2f} % of 100 steps; the call alone {call:.3f} s"
        )


def resume(gigabytes: float) -> None:
    Path("config.yaml").write_text("name: bench\ndata: {sources: [stdlib]}\nfleet: {nodes: 1}\n")
    config, _ = load(Settings(Path("config.yaml")))
    with join(devices.nearest()) as world:
        model, optimizer = state_of(gigabytes)
        checkpoints = Checkpoints(Run(Path("runs/bench")), config, "tokens", world)
        checkpoints.save(TorchParts(model, optimizer), TrainingProgress(1), 0.0)
        checkpoints.settle()
        write("plain.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        state_dict_saver.save(collected(model, optimizer), checkpoint_id="dcp")
        for cold in (True, False, False):
            for name, back in (
                ("ours", load_ours),
                ("torch.load", load_plain),
                ("dcp.load", load_dcp),
            ):
                model, optimizer = state_of(gigabytes)
                if cold:
                    forget()
                began, used = time.perf_counter(), time.process_time()
                back(model, optimizer, config, world)
                took = (
                    f"{time.perf_counter() - began:6.2f} s, {time.process_time() - used:6.2f} CPU s"
                )
                print(f"{name:<11} {took}  {'cold' if cold else 'warm'}", flush=True)


def save(gigabytes: float, rounds: int) -> None:
    """The first save, which takes memory and plans, is left out."""
    Path("config.yaml").write_text("name: bench\ndata: {sources: [stdlib]}\nfleet: {nodes: 1}\n")
    config, _ = load(Settings(Path("config.yaml")))
    with join(devices.nearest()) as world:
        parts = TorchParts(*state_of(gigabytes))
        checkpoints = Checkpoints(Run(Path("runs/bench")), config, "tokens", world)
        for step in range(rounds + 1):
            began, used = time.perf_counter(), time.process_time()
            checkpoints.save(parts, TrainingProgress(step), 0.0)
            checkpoints.settle()
            if step:
                print(
                    f"save {time.perf_counter() - began:6.3f} s, {time.process_time() - used:6.3f} CPU s",
                    flush=True,
                )


def state_of(gigabytes: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights and two moments of sixteen layers, together so large."""
    width = int((gigabytes * 1e9 / 12 / 16) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def collected(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def forget() -> None:
    """Has the kernel drop these files from its cache."""
    for path in Path().rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_ours(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, world: World
) -> None:
    assert (
        Checkpoints(Run(Path("runs/bench")), config, "tokens", world)
        .resume(TorchParts(model, optimizer))
        .step
        == 1
    )


def load_plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, world: World
) -> None:
    state = torch.load("plain.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def load_dcp(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, world: World
) -> None:
    state = collected(model, optimizer)
    state_dict_loader.load(state, checkpoint_id="dcp")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def main(what: str, *words: str) -> None:
    if what == "rank":
        return stall(words[0], int(words[1]))
    here = str(Path(__file__).resolve())
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        os.chdir(folder)
        if what == "save":
            return save(float(words[0]) if words else 1.0, int(words[1]) if len(words) > 1 else 6)
        if what == "resume":
            return resume(float(words[0]) if words else 1.0)
        name, rounds, ranks = (
            words[0],
            words[1] if len(words) > 1 else "6",
            words[2] if len(words) > 2 else "1",
        )
        common = f"name: bench\ndata: {{sources: [stdlib], vocab_size: 2048}}\nfleet: {{nodes: {ranks}}}\n"
        Path("config.yaml").write_text(
            common
            + (CONFIGS[name] or "train: {global_batch_size: 8, optimizer: muon, precision: fp32}\n")
        )
        tokenize(load(Settings(Path("config.yaml")))[0].data, Share(0, 1, 1))
        os.environ["PYTHONPATH"] = str(
            Path(run_folder.__file__).parents[2]
        )  # it may have been a relative one
        launch = [
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={ranks}",
            "--master-port=0",
            "--standalone",
        ]
        subprocess.run([sys.executable, *launch, here, "rank", name, rounds], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
