"""Skips steps whose loss or gradients are not finite, or lie far above their running mean.

It is decided on the device, from numbers that all ranks have summed, so every rank skips the same
steps and no host waits to learn which. OLMo-core's SkipStepOptimizer looks at the same two numbers
(github.com/allenai/OLMo-core).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..config.types import Train
from ..trust.errors import RunError
from .loss_scale import LEAST, Scale
from .parallel.rank_model import Parts
from .world import World

MEMORY = (
    128  # steps that the running mean and spread cover; before as many, nothing counts as a spike
)
FLOOR = (
    0.01  # of the mean: the least spread, so that a flat loss does not turn a ripple into a spike
)
# numbers of the state that are no counts: the means and variances of loss and norm, and how many
# steps they are of
MOMENTS = 5


class StepGuard:
    """Running mean and variance of loss and gradient norm, and the skipped steps; all of it on the
    device.
    """

    def __init__(
        self, train: Train, world: World, state: Sequence[float] = (), scale: Scale | None = None
    ) -> None:
        """`state` is that of an earlier guard, so that a resumed run skips what an uninterrupted
        one would.

        With a loss `scale`, gradients that are not finite beside a loss that is are its fault, and
        no bad step.
        """
        self.train, self.world, self.scale, device = train, world, scale, world.device.torch_device
        state = state or (0.0,) * (MOMENTS + 3)
        self.mean, self.variance = (
            torch.tensor(state[first : first + 2], device=device) for first in (0, 2)
        )
        self.steps = torch.tensor(state[4], device=device)
        # left out in a row, in all; the last one
        self.counts = torch.tensor(state[MOMENTS:], dtype=torch.int64, device=device)
        self.seen = torch.zeros(2, device=device)

    def skips(self, step: int, loss: Tensor, norm: Tensor) -> Tensor:
        """1.0 where the step is to be skipped, else 0.0. `loss` is the rank's share; the mean over
        the ranks is the batch's.
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
        """Whether the step's gradients overflowed for their scale, which takes note of it; never
        without one.
        """
        loss, norm = self.seen.isfinite()
        if self.scale is None:
            return torch.zeros_like(loss)
        self.scale.judge(step, ~norm)
        return torch.logical_and(loss, ~norm)

    def _remember(self, seen: Tensor, finite: Tensor) -> None:
        """Updates mean and variance by a step; a spike counts as the limit that it exceeded, so a
        lasting level becomes usual.
        """
        self.steps = self.steps + finite
        rate = finite / self.steps.clamp(1, MEMORY)
        off = seen - self.mean
        self.mean = self.mean + rate * off
        self.variance = (1 - rate) * (self.variance + rate * off.square())

    def state(self) -> tuple[float, ...]:
        """The numbers that another guard continues from; the host waits for the device."""
        return tuple(
            torch.cat((self.mean, self.variance, self.steps[None])).tolist() + self.counts.tolist()
        )

    def check(self, parts: Parts, name: str) -> int:
        """How many steps were skipped in all, but for those that overflowed; the host waits for the
        device.

        Where programs are only recorded, what is read back means nothing, and nothing is judged by
        it.

        Raises:
            RunError: `train.skips_in_a_row` steps were, one after the other, or the weights are
                past saving, or the loss scale is. All ranks raise it, with the same words.
        """
        if not self.world.device.executes:
            return 0
        row, total, last = (int(count) for count in self.counts.tolist())
        broken = self._broken(parts) if row else []
        if broken or row >= self.train.skips_in_a_row:
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
            why=f"{overflowed:,.0f} steps overflowed and were left out, and each halved the "
            f"scale; {weights}",
            next="lower train.learning_rate or raise train.warmup_steps, or set "
            "train.precision=fp32; make train then resumes from the last checkpoint",
        )

    def _verdict(self, row: int, last: int, broken: list[str], name: str) -> RunError:
        first, batch = last - row + 1, self.train.global_batch
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
                f"the weights are finite; those steps took {samples}, and were left out "
                "(train.skips_in_a_row)"
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
        """The first few parameters of any rank that have a number which is not finite. All ranks
        call it together.
        """
        found: list[list[str]] = [[]] * self.world.size
        dist.all_gather_object(found, parts.broken(), group=self.world.hosts)
        return sorted({name for names in found for name in names})[:4]
