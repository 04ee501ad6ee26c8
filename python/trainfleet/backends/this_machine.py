"""Existing machines, and this machine as those of the local backend."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import version
from pathlib import Path

from ..hardware import node_types
from ..node.placement import LINK, unlinked
from ..plan.request import Artifact
from ..process import file_systems
from ..trust.errors import BackendError
from .base import Machines


class Standing(Machines):
    """Machines (base.py) that already exist: setup only prints what they are, and nothing is left
    to remove.
    """

    def changes(self) -> tuple[Artifact, ...]:
        return ()

    def left(self) -> list[str]:
        return []

    def remove(self, purge: bool) -> None: ...


class ThisMachine(Standing):
    """This machine, which simulates `nodes` nodes."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def apply(self) -> int:
        """Prints the devices to train on. BackendError if simulated nodes could not reach each
        other.
        """
        if fault := unlinked():
            raise BackendError(fault, next=LINK)
        accelerators = node_types.local_accelerators()
        rows = {
            "python": platform.python_version(),
            "torch": version("torch"),
            "cores": str(node_types.local_cores()),
            "accelerators": str(accelerators)
            if accelerators
            else "none: training runs on the cores",
            "disk free": f"{shutil.disk_usage('.').free / 1e9:.0f} GB",
        }
        for name, value in rows.items():
            print(f"{name:13} {value}")
        if self.nodes > node_types.local_cores():
            print(
                f"note: {self.nodes} nodes share {node_types.local_cores()} cores; that works, "
                "but each is slower"
            )
        file_systems.look(Path())
        print("ready; nothing else needs setting up on the local backend\nnext: make train")
        return 0
