"""An existing Slurm cluster as machines."""

from __future__ import annotations

import re

from ...trust.errors import BackendError
from ...trust.untrusted_input import show
from ..this_machine import Standing
from .client import SlurmClient, read_partitions


class Partitions(Standing):
    """The machines of a cluster that others administer."""

    def __init__(self, engine: SlurmClient) -> None:
        self.engine = engine

    def apply(self) -> int:
        """Prints the cluster's version and partitions."""
        version = self.engine.run("sinfo", "--version").strip()
        rows = read_partitions(self.engine.run("scontrol", "--oneliner", "show", "partition"))
        if not re.match(r"slurm\S* \d+\.\d+", version) or not rows:
            why = (
                f"sinfo --version prints {show(version)}, and scontrol show partition lists "
                f"{len(rows)} partitions"
            )
            raise BackendError(
                "this Slurm can't be used",
                why=why,
                next="module load slurm; scontrol ping",
            )
        print(version)
        for row in rows:
            most = f"{row.most_minutes} min at most" if row.most_minutes else "no time limit"
            print(
                f"partition {row.name}: {row.nodes} nodes, "
                f"{most}{', the default' if row.is_default else ''}"
                f"{'' if row.is_up else ', takes no jobs now'}"
            )
        print("the cluster's administrators set it up\nnext: make train")
        return 0
