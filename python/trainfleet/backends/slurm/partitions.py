"""An existing Slurm cluster as machines: nothing is set up, and nothing is left."""

from __future__ import annotations

import re

from ...config import Config
from ...door import show
from ...errors import BackendError
from ...plan.request import Artifact
from .engine import Engine, read_partitions


class Partitions:
    """Machines (base.py) of a cluster that others administer."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self.config, self.engine = config, engine

    def changes(self) -> tuple[Artifact, ...]:
        return ()

    def apply(self) -> int:
        """Says what the cluster has."""
        version = self.engine.run("sinfo", "--version").strip()
        rows = read_partitions(self.engine.run("scontrol", "--oneliner", "show", "partition"))
        if not re.match(r"slurm\S* \d+\.\d+", version) or not rows:
            why = f"sinfo --version says {show(version)}, and scontrol show partition names {len(rows)} partitions"
            raise BackendError("this is no Slurm that can be used", why=why, next="module load slurm; scontrol ping")
        print(version)
        for row in rows:
            most = f"{row.most_minutes} min at most" if row.most_minutes else "no time limit"
            print(f"partition {row.name}: {row.nodes} nodes, {most}{', the default' if row.is_default else ''}"
                  f"{'' if row.is_up else ', takes no jobs now'}")  # fmt: skip
        print("the cluster is set up by whoever looks after it\nnext: make train")
        return 0

    def left(self) -> list[str]:
        return []

    def remove(self, purge: bool) -> None: ...
