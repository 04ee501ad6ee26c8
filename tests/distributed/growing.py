"""The memory of one process while it saves a state of MEGABYTES again and again: `python growing.py FOLDER MEGABYTES SAVES`.

Prints bytes (PSS, /proc/self/smaps_rollup) before the first save and after each.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from faults import CONFIG, join, save
from torch import nn

from trainfleet.config import Settings, load
from trainfleet.engine.checkpoint import Checkpoints
from trainfleet.run.run_folder import Run


def memory() -> int:
    found = re.search(r"^Pss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def main(folder: Path, megabytes: int, saves: int) -> None:
    torch.set_num_threads(1)
    (folder / "config.yaml").write_text(CONFIG)
    config, _ = load(Settings(folder / "config.yaml"))
    width = int(
        (megabytes * 1e6 / 3 / 4 / 16) ** 0.5
    )  # weights and two moments, fp32, sixteen matrices
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoints = Checkpoints(Run(folder), config, "tokens", join())
    used = [memory()]
    for step in range(1, saves + 1):
        save(checkpoints, model, optimizer, step)
        checkpoints.settle()
        used.append(memory())
    print(json.dumps(used))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
