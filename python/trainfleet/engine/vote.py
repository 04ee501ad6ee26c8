"""A vote: what one rank asks for (to stop, to save), all ranks do at the same step, without
delaying any step.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from .tree_allreduce import Tree

# A scheduler's notice (Slurm, SageMaker, Batch), the terminal's, and Slurm's early one. A spot
# notice comes by notices.Watch.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class Proposal:
    """What a rank asks for at a step boundary, beside a stop."""

    save: bool = False
    fail: bool = False


@dataclass(frozen=True)
class Decision:
    """What any rank asked for, the same on all ranks."""

    stop: bool = False
    save: bool = False
    fail: bool = False


class Vote:
    """The vote at each step boundary, with the same decision on all ranks.

    Each call starts a sum over the ranks on their hosts (tree_allreduce.py) and reads the one that
    the call before started: a step that took longer than a few messages has it already, and what a
    rank heard of reaches the fleet at the boundary after the next.
    """

    def __init__(self, file: Path | None, tree: Tree) -> None:
        """`file` asks for a stop if it exists; only the rank with a file checks it."""
        self.file, self.tree = file, tree
        # that this rank is to stop: set by a signal, by the file, by whoever holds the vote
        self.heard = False
        self.votes = torch.zeros(3)
        self.under_way = False
        for number in SIGNALS:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True

    def agreed(self, proposal: Proposal) -> Decision:
        """What all ranks do at this boundary."""
        decision = self.settle()
        self.heard = self.heard or (self.file is not None and self.file.exists())
        self.votes = torch.tensor([self.heard, proposal.save, proposal.fail], dtype=torch.float32)
        self.tree.begin(self.votes)
        self.under_way = True
        return decision

    def settle(self) -> Decision:
        """The decision of the vote under way, if there is one; none is under way after it."""
        if not self.under_way:
            return Decision()
        self.tree.end()
        self.under_way = False
        return Decision(*(count > 0 for count in self.votes.tolist()))
