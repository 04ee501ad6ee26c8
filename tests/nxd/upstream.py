"""NxD Core's own resume, on its real source: `python upstream.py FOLDER` as one of two data-parallel ranks, as check.py starts it.

Since SDK 2.22 load_checkpoint loads the optimizer before the model. ZeRO-1 then takes its shards from weights that are not loaded
yet, and the first step after a resume brings those back, where the checkpoint has no fp32 copies (NxD's default). Prints, as JSON,
the loss after the next step: of the run itself, of one that was resumed by NxD, and of one whose model was loaded first.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import rank as start

STEPS = 4


def losses(folder: str) -> dict[str, float]:
    import neuronx_distributed as nxd
    import torch
    import torch_xla.core.xla_model as xm
    from torch import nn

    options = nxd.neuronx_distributed_config(
        optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
        mixed_precision_config={
            "use_master_weights": True,
            "use_fp32_grad_acc": True,
            "use_master_weights_in_ckpt": False,
        },
    )
    device = xm.xla_device()

    def build(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(torch.bfloat16)
        model = nxd.initialize_parallel_model(options, lambda: layers)
        return model, nxd.initialize_parallel_optimizer(
            options, torch.optim.AdamW, model.parameters(), lr=0.02
        )

    def step(model: Any, optimizer: Any, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn((8, 16), generator=generator).to(torch.bfloat16).to(device)
        y = torch.randint(0, 4, (8,), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        xm.mark_step()
        return float(loss)

    def next_two(model: Any, optimizer: Any) -> float:
        step(model, optimizer, STEPS)
        return step(model, optimizer, STEPS + 1)

    model, optimizer = build(1)
    for number in range(STEPS):
        step(model, optimizer, number)
    nxd.save_checkpoint(folder, "four", model=model, optimizer=optimizer)
    found = {"whole": next_two(model, optimizer)}
    for name, first in (("resumed", False), ("model first", True)):
        model, optimizer = build(2)
        if first:
            nxd.load_checkpoint(folder, "four", model=model)
        nxd.load_checkpoint(folder, "four", model=model, optimizer=optimizer)
        found[name] = next_two(model, optimizer)
    return found


if __name__ == "__main__":
    start.install()
    import torch
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("xla")
    told = losses(sys.argv[1])
    if os.environ["RANK"] == "0":
        print(json.dumps(told), flush=True)
    os._exit(0)
