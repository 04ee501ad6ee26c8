"""make setup: what make has not done already by building .venv. On this machine: says what there is to train on."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import version

from .. import hardware
from ..config import Config, load
from .settings import settings_of
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    config, _ = load(settings_of(variables))
    if config.fleet.reached_by_ssh:
        from ..nodes import setup as hosts  # loads SSH

        return hosts.main(config)
    return describe_machine(config)


def describe_machine(config: Config) -> int:
    """Prints what this machine, which plays all nodes, has to train on."""
    accelerators = hardware.local_accelerators()
    rows = {
        "python": platform.python_version(),
        "torch": version("torch"),
        "cores": str(hardware.local_cores()),
        "accelerators": str(accelerators) if accelerators else "none: training runs on the cores",
        "disk free": f"{shutil.disk_usage('.').free / 1e9:.0f} GB",
    }
    for name, value in rows.items():
        print(f"{name:13} {value}")
    nodes = config.fleet.nodes
    if nodes > hardware.local_cores():
        print(f"note: {nodes} nodes share {hardware.local_cores()} cores; that works, and each is slower")
    print("ready; nothing else needs setting up on the local backend\nnext: make train")
    return 0
