"""One state through a chain of layouts: `python layouts.py FOLDER dp4 fsdp2 pp2 ...` resumes and saves it in each, on real ranks.

The layouts are torch's own, on dimensions that no degree divides. Every layout starts from other numbers, resumes the checkpoint of
the one before, and saves what it then has as the next step; a test compares the files.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainfleet import devices
from trainfleet.config import Settings, load
from trainfleet.engine.checkpoint import Checkpoints, TrainingProgress
from trainfleet.engine.parallel.rank_model import TorchParts
from trainfleet.engine.world import World, join
from trainfleet.run.run_folder import Run

CONFIG = """
name: shapes
data: {sources: [text], vocab_size: 300}
model: {layers: 1, hidden_size: 8, heads: 2, kv_heads: 1, intermediate_size: 8}
checkpoint: {keep: 100}
"""


class Net(nn.Module):
    """Odd shapes: no degree of parallelism divides them."""

    def __init__(self, layers: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7) if 0 in layers else None
        self.layers = nn.ModuleDict({str(layer): Block() for layer in layers})
        self.head = nn.Linear(7, 11) if 1 in layers else None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(7, 13),
            nn.Linear(13, 7, bias=False),
            nn.RMSNorm(7),
        )


def whole(ranks: int) -> nn.Module:
    """The same on every rank."""
    return Net()


def sharded(ranks: int) -> nn.Module:
    net, mesh = Net(), init_device_mesh("cpu", (ranks,))
    for block in net.layers.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def tensor_parallel(ranks: int) -> nn.Module:
    """Halves of the matrices on two ranks each, and each half replicated over the others."""
    net, mesh = Net(), init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in net.layers.values():
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def both(ranks: int) -> nn.Module:
    """Tensor parallel, and what remains sharded."""
    net, mesh = Net(), init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("fsdp", "tp"))
    for block in net.layers.values():
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["fsdp"])
    return net


def pipeline(ranks: int) -> nn.Module:
    """Each rank has one of the layers."""
    return Net((int(os.environ["RANK"]) % 2,))


LAYOUTS: dict[str, Callable[[int], nn.Module]] = {
    "dp": whole,
    "fsdp": sharded,
    "tp": tensor_parallel,
    "fsdptp": both,
    "pp": pipeline,
}


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A few steps on gradients of the right shapes."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def draw() -> list[float]:
    """From every random number generator that training may use."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def work(folder: Path, layout: str, step: int, world: World) -> None:
    """Resumes, or trains at the first step, and saves the next."""
    torch.manual_seed(1000 * step + world.rank)
    kind = layout.rstrip("0123456789")
    net = LAYOUTS[kind](world.size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    config, _ = load(Settings(folder / "config.yaml"))
    checkpoints = Checkpoints(Run(folder), config, "tokens", world)
    progress = checkpoints.resume(parts := TorchParts(net, optimizer))
    assert progress.step == step
    if step == 0:
        torch.manual_seed(0)
        for parameter in net.parameters():
            nn.init.normal_(parameter)
        train(net, optimizer)
    drawn = draw()
    checkpoints.save(parts, TrainingProgress(step + 1), loss=0.0)
    checkpoints.settle()
    (folder / f"draws-{step}-{world.rank}.json").write_text(
        json.dumps({"resumed": drawn, "next": draw()})
    )


def fork(folder: Path, layout: str, step: int, rank: int, ranks: int, port: int) -> int:
    if child := os.fork():
        return child
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "GROUP_RANK": str(rank),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    code = 1
    try:
        with join(devices.nearest()) as world:
            work(folder, layout, step, world)
        code = 0
    except Exception:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.AdamW(
        nn.Linear(1, 1).parameters()
    )  # imports, once for all forks, what torch imports late
    here = Path(sys.argv[1])
    (here / "config.yaml").write_text(CONFIG)
    for number, name in enumerate(sys.argv[2:]):
        count, port = int(name.lstrip("abcdefghijklmnopqrstuvwxyz")), free_port()
        children = [fork(here, name, number, rank, count, port) for rank in range(count)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"{name}: ranks ended with {codes}")
