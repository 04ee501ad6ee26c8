"""Scales the loss for fp16, which ends at 65,504 and rounds numbers below 6e-8 to 0, including many
small gradients.

The loss is multiplied by the scale before a backward pass, and the gradients are divided by it
before they are clipped (Micikevicius et al. 2018, arXiv:1710.03740). The rule and its numbers are
torch.amp.GradScaler's; tests compare both. GradScaler itself checks only the gradients of one rank.
With an optimizer that isn't torch's own, it makes the host wait at every step. The gradients' norm,
which the engine has anyway, covers all ranks and stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

START = 65536.0
# doubled after that many good steps in a row, halved when gradients overflow
GROWTH, BACKOFF, INTERVAL = (2.0, 0.5, 2000)
LEAST = 1.0  # below it the gradients overflow fp16 without a scale, and no scale helps
MOST = 2.0**100  # beyond it the scaled loss might overflow fp32


class Scale:
    """The scale, the number of good steps since it changed, and the steps that overflowed; all of
    it on the device.
    """

    def __init__(self, device: torch.device, state: Sequence[float] = ()) -> None:
        """Continues from an earlier one's `state`, so that a resumed run scales like an
        uninterrupted one.
        """
        factor, good, overflowed, last = state or (START, 0, 0, 0)
        self.factor = torch.tensor(float(factor), device=device)
        self.good = torch.tensor(min(int(good), INTERVAL), dtype=torch.int64, device=device)
        # overflowed steps in all; the last one
        self.counts = torch.tensor((overflowed, last), dtype=torch.int64, device=device)

    def judge(self, step: int, overflowed: Tensor) -> None:
        """Records whether a step's gradients overflowed: a bool on the device, the same on all
        ranks.
        """
        good = self.good + 1
        grown = torch.where(good >= INTERVAL, (self.factor * GROWTH).clamp(max=MOST), self.factor)
        # in place: the engine's parts hold it too
        self.factor.copy_(torch.where(overflowed, self.factor * BACKOFF, grown))
        self.good = torch.where(overflowed | (good >= INTERVAL), 0, good)
        total, last = self.counts
        self.counts = torch.stack((total + overflowed, torch.where(overflowed, step, last)))

    def state(self) -> tuple[float, ...]:
        """Returns the numbers from which another one continues; the host waits for the device."""
        return (self.factor.item(), self.good.item(), *self.counts.tolist())

    def meters(self) -> dict[str, float]:
        """Returns its part of a line of metrics."""
        return {"loss_scale": self.factor.item(), "overflowed": int(self.counts[0])}
