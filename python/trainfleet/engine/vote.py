"""Votes: all ranks do at the same step what one rank requests (a stop, a save), without delaying
any step.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from .tree_allreduce import Tree

# A scheduler's notice (Slurm, SageMaker, Batch), the terminal's, and Slurm's early one. A spot
# notice comes through spot_notice.NoticePoller.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class Proposal:
    """A rank's requests at a step boundary, except for a stop."""

    save: bool = False
    fail: bool = False


@dataclass(frozen=True)
class Decision:
    """The requests of any rank, the same on all ranks."""

    stop: bool = False
    save: bool = False
    fail: bool = False


class Vote:
    """The vote at each step boundary, with the same decision on all ranks.

    Each call starts a sum over the ranks on their hosts (tree_allreduce.py) and reads the sum that
    the last call started. A step that took longer than a few messages already has it. So a rank's
    request reaches the fleet at the boundary after the next.
    """

    def __init__(self, file: Path | None, tree: Tree) -> None:
        """Starts voting; `file` requests a stop if it exists; only the rank with a file checks
        it.
        """
        self.file, self.tree = file, tree
        # this rank must stop: set by a signal, by the file, or by the holder of the vote
        self.heard = False
        self.votes = torch.zeros(3)
        self.under_way = False
        for number in SIGNALS:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.heard = True

    def agreed(self, proposal: Proposal) -> Decision:
        """Returns the decision of all ranks at this boundary."""
        decision = self.settle()
        self.heard = self.heard or (self.file is not None and self.file.exists())
        self.votes = torch.tensor([self.heard, proposal.save, proposal.fail], dtype=torch.float32)
        self.tree.begin(self.votes)
        self.under_way = True
        return decision

    def settle(self) -> Decision:
        """Returns the decision of the vote under way, if there is one, and ends that vote."""
        if not self.under_way:
            return Decision()
        self.tree.end()
        self.under_way = False
        return Decision(*(count > 0 for count in self.votes.tolist()))
