"""How a stop that one rank heard of becomes every rank's, at one step, with no step waiting for it."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # a scheduler's, the terminal's, and Slurm's early notice


class StopVote:
    """Asked at each step boundary; says yes to all ranks at the same one.

    Each call starts a sum over the ranks on the CPU and reads the one that the call before started: a step that took longer
    than a message has it already, and a rank that hears of a stop stops the fleet at the boundary after the next.
    """

    def __init__(self, file: Path | None) -> None:
        """`file` asks for a stop by being there; only the rank that is given it looks."""
        self.file = file
        self.heard = False
        self.votes = torch.zeros(1)
        self.under_way: dist.Work | None = None
        for number in SIGNALS:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True

    def agreed(self) -> bool:
        """Whether all ranks stop here."""
        answer = self.settle()
        self.heard = self.heard or (self.file is not None and self.file.exists())
        self.votes = torch.tensor([float(self.heard)])
        self.under_way = dist.all_reduce(self.votes, async_op=True)
        return answer

    def settle(self) -> bool:
        """The answer of the vote under way, if there is one; none is under way after it."""
        if self.under_way is None:
            return False
        self.under_way.wait()
        self.under_way = None
        return bool(self.votes.item() > 0)
