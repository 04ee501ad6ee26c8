"""What one of several ranks holds, without the others: `python lone.py CONFIG RANK`, on the stand-in and torch's fake process group.

Prints, as JSON, for each parameter: its size here, its size in a checkpoint, on how many ranks its heads are, and whether those add
their gradients up.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import standin
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainfleet import devices
from trainfleet.config import Settings, load
from trainfleet.devices.base import Device
from trainfleet.engine.world import World


def held(config: Path, rank: int) -> dict[str, Any]:
    found, _ = load(Settings(config))
    size = found.fleet.nodes * found.fleet.ranks_per_node
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    make = dist.new_group
    dist.new_group = lambda ranks, backend="": make(ranks)  # gloo would look for the others
    standin.install()
    from trainfleet_nxd.parts import Nxd

    device: Device = devices.KINDS["neuron_xla"](0)
    device.start()
    parts = Nxd(found, World(rank, size, 0, device, True, None))
    saved = parts.state()["model"]
    return {
        name: (
            tuple(own.parameter.shape),
            tuple(saved[name].shape),
            own.slice.copies,
            bool(own.parameter._backward_hooks),
        )
        for name, own in parts.held.items()
    }


if __name__ == "__main__":
    print(json.dumps(held(Path(sys.argv[1]), int(sys.argv[2]))))
