"""Skips steps with a loss or gradients that are not finite, or far above their running mean, and
scales the loss for fp16.

The decision is made on the device, from numbers summed over all ranks. So every rank skips the same
steps and no host waits for it. OLMo-core's SkipStepOptimizer checks the same two numbers
(github.com/allenai/OLMo-core).

fp16 ends at 65,504 and rounds numbers below 6e-8 to 0, including many small gradients. The loss is
multiplied by the scale before a backward pass, and the gradients are divided by it before they are
clipped (Micikevicius et al. 2018, arXiv:1710.03740). The rule and its numbers are
torch.amp.GradScaler's; tests compare both. GradScaler itself checks only the gradients of one rank.
With an optimizer that isn't torch's own, it makes the host wait at every step. The gradients' norm,
which the engine has anyway, covers all ranks and stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..config.types import Train
from ..trust.errors import RunError
from .parallel.rank_model import Parts
from .world import World

# steps that the running mean and spread cover; before that many, nothing counts as a spike
MEMORY = 128
# the least spread as a fraction of the mean, so that a ripple in a flat loss is not a spike
FLOOR = 0.01
# numbers of the state that are not counts: means and variances of loss and norm, and their number
# of steps
MOMENTS = 5

START = 65536.0
# doubled after that many good steps in a row, halved when gradients overflow
GROWTH, BACKOFF, INTERVAL = (2.0, 0.5, 2000)
LEAST = 1.0  # below it the gradients overflow fp16 without a scale, and no scale helps
MOST = 2.0**100  # beyond it the scaled loss might overflow fp32


class StepGuard:
    """Running mean and variance of loss and gradient norm, and the skipped steps; all of it on the
    device.
    """

    def __init__(
        self, train: Train, world: World, state: Sequence[float] = (), scale: Scale | None = None
    ) -> None:
        """Continues from an earlier guard's `state`, so that a resumed run skips the same steps as
        an uninterrupted one.

        With a loss `scale`, gradients that are not finite next to a finite loss are the scale's
        fault, and not a bad step.
        """
        self.train, self.world, self.scale, device = train, world, scale, world.device.torch_device
        state = state or (0.0,) * (MOMENTS + 3)
        self.mean, self.variance = (
            torch.tensor(state[first : first + 2], device=device) for first in (0, 2)
        )
        self.steps = torch.tensor(state[4], device=device)
        # skipped in a row, in all; the last one
        self.counts = torch.tensor(state[MOMENTS:], dtype=torch.int64, device=device)
        self.seen = torch.zeros(2, device=device)

    def skips(self, step: int, loss: Tensor, norm: Tensor) -> Tensor:
        """Returns 1.0 if the step must be skipped, else 0.0. `loss` is the rank's share; the mean
        over the ranks is the batch's.
        """
        self.seen = self.world.mean(torch.stack((loss.float(), norm.float())))
        limit = self.mean + self.train.spike_sigmas * torch.maximum(
            self.variance.sqrt(), FLOOR * self.mean
        )
        watched = (self.steps >= MEMORY) & (self.train.spike_sigmas > 0)
        limit = torch.where(watched, limit, torch.inf)
        finite = self.seen.isfinite().all()
        out = ~finite | (self.seen > limit).any()
        self._remember(torch.where(finite, self.seen.minimum(limit), self.mean), finite)
        bad = out & ~self._overflowed(step)
        row, total, last = self.counts
        row = torch.where(out & ~bad, row, (row + 1) * bad)
        self.counts = torch.stack((row, total + bad, torch.where(bad, step, last)))
        return out.float()

    def _overflowed(self, step: int) -> Tensor:
        """Tells whether the step's gradients overflowed because of their scale, and lets the scale
        record it; never without a scale.
        """
        loss, norm = self.seen.isfinite()
        if self.scale is None:
            return torch.zeros_like(loss)
        self.scale.judge(step, ~norm)
        return torch.logical_and(loss, ~norm)

    def _remember(self, seen: Tensor, finite: Tensor) -> None:
        """Updates mean and variance by a step. A spike counts as the limit that it exceeded, so a
        lasting level becomes usual.
        """
        self.steps = self.steps + finite
        rate = finite / self.steps.clamp(1, MEMORY)
        off = seen - self.mean
        self.mean = self.mean + rate * off
        self.variance = (1 - rate) * (self.variance + rate * off.square())

    def state(self) -> tuple[float, ...]:
        """Returns the numbers from which another guard continues; the host waits for the device."""
        return tuple(
            torch.cat((self.mean, self.variance, self.steps[None])).tolist() + self.counts.tolist()
        )

    def check(self, parts: Parts, name: str) -> int:
        """Returns how many steps were skipped in all, except those that overflowed; the host waits
        for the device.

        If programs are only recorded, the values read back are meaningless, and no step is judged
        by them.

        Raises:
            RunError: `train.max_consecutive_skips` steps in a row were skipped, or the weights or
                the loss scale are beyond repair. All ranks raise it, with the same words.
        """
        if not self.world.device.executes:
            return 0
        row, total, last = (int(count) for count in self.counts.tolist())
        broken = self._broken(parts) if row else []
        if broken or row >= self.train.max_consecutive_skips:
            raise self._verdict(row, last, broken, name)
        if self.scale and self.scale.factor.item() < LEAST:
            raise self._collapse(self.scale, self._broken(parts), name)
        return total

    def _collapse(self, scale: Scale, broken: list[str], name: str) -> RunError:
        factor, _, overflowed, last = scale.state()
        weights = (
            f"numbers in the weights are not finite: {', '.join(broken)}"
            if broken
            else "the weights are finite"
        )
        return RunError(
            f"the gradients were not finite at step {last:.0f}: they overflow fp16 with no loss "
            f"scale left ({factor:g})",
            where=f"run {name}",
            why=f"{overflowed:,.0f} steps overflowed and were skipped, and each halved the "
            f"scale; {weights}",
            next="lower train.learning_rate or raise train.warmup_steps, or set "
            "train.precision=fp32; make train then resumes from the last checkpoint",
        )

    def _verdict(self, row: int, last: int, broken: list[str], name: str) -> RunError:
        first, batch = last - row + 1, self.train.global_batch_size
        loss, norm = self.seen.tolist()
        samples = f"samples {(first - 1) * batch} to {last * batch - 1} of the training order"
        cured = (
            "lower train.learning_rate or raise train.warmup_steps; make train then resumes "
            "from the last checkpoint"
        )
        if broken:
            why = f"numbers in the weights are not finite: {', '.join(broken)}"
        else:
            why = (
                f"the weights are finite; those steps took {samples}, and were skipped "
                "(train.max_consecutive_skips)"
            )
            cured += f"; make inspect SAMPLE={(first - 1) * batch} shows the data"
        what = "spiked" if self.seen.isfinite().all() else "were not finite"
        return RunError(
            f"the loss or its gradients {what} in steps {first} to {last} (loss {loss:.4g}, norm "
            f"{norm:.4g})",
            where=f"run {name}",
            why=why,
            next=cured,
        )

    def _broken(self, parts: Parts) -> list[str]:
        """Returns the first few parameters of any rank with a number that is not finite. All ranks
        call it together.
        """
        found: list[list[str]] = [[]] * self.world.size
        dist.all_gather_object(found, parts.broken(), group=self.world.hosts)
        return sorted({name for names in found for name in names})[:4]


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
