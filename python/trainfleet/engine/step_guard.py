"""Skips steps with a non-finite or spiking loss or gradient norm; scales the loss for fp16.

The device decides, based on values reduced over all ranks, so every rank skips the same steps
without waiting for the device. OLMo-core's SkipStepOptimizer checks the same two values
(github.com/allenai/OLMo-core).

fp16 overflows above 65,504 and rounds numbers below 6e-8 to 0, including many small gradients. The
loss is therefore multiplied by a scale before the backward pass, and gradients are divided by it
before clipping (Micikevicius et al. 2018, arXiv:1710.03740). The update rule and its constants are
those of torch.amp.GradScaler; tests compare both.

GradScaler itself checks only one rank's gradients, and with optimizers from outside torch, it makes
the host wait at every step. The gradient norm, which the engine computes anyway, covers all ranks
and stays on the device.
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

# window for the running mean and variance, in steps; spikes are detected only once it is full
MEMORY = 128
# Minimum standard deviation as a fraction of the mean, so that noise in a flat loss is not a spike.
FLOOR = 0.01
# number of floats for the mean and variance of loss and gradient norm, and the step count
MOMENTS = 5

START = 65536.0
# The scale is multiplied by GROWTH after INTERVAL good steps in a row, and by BACKOFF after an
# overflow.
GROWTH, BACKOFF, INTERVAL = (2.0, 0.5, 2000)
LEAST = 1.0  # minimum scale; below it, gradients overflow fp16 even without scaling
MOST = 2.0**100  # maximum scale; above it, the scaled loss might overflow fp32


class StepGuard:
    """Running statistics of loss and gradient norm, and counts of skipped steps, kept on the
    device.
    """

    def __init__(
        self, train: Train, world: World, state: Sequence[float] = (), scale: Scale | None = None
    ) -> None:
        """Restores an earlier guard's `state`, so that a resumed run skips the same steps.

        With a loss `scale`, non-finite gradients with a finite loss count as an overflow rather
        than a bad step.
        """
        self.train = train
        self.world = world
        self.scale = scale
        device = world.device.torch_device
        state = state or (0.0,) * (MOMENTS + 3)
        self.mean, self.variance = (
            torch.tensor(state[first : first + 2], device=device) for first in (0, 2)
        )
        self.steps = torch.tensor(state[4], device=device)
        # consecutive skipped steps, total skipped steps, last skipped step
        self.counts = torch.tensor(state[MOMENTS:], dtype=torch.int64, device=device)
        self.seen = torch.zeros(2, device=device)

    def skips(self, step: int, loss: Tensor, norm: Tensor) -> Tensor:
        """Returns 1.0 if the step must be skipped, otherwise 0.0, as a device tensor.

        `loss` is this rank's term of the global loss, which is the mean over all ranks' terms.
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
        """Updates the loss scale and returns whether this step's gradients overflowed because of
        it.

        Returns False without a loss scale.
        """
        loss, norm = self.seen.isfinite()
        if self.scale is None:
            return torch.zeros_like(loss)
        self.scale.judge(step, ~norm)
        return torch.logical_and(loss, ~norm)

    def _remember(self, seen: Tensor, finite: Tensor) -> None:
        """Adds a step to the running mean and variance.

        A spike is clamped to the limit that it exceeded, so the statistics adapt slowly to a new
        level.
        """
        self.steps = self.steps + finite
        rate = finite / self.steps.clamp(1, MEMORY)
        off = seen - self.mean
        self.mean = self.mean + rate * off
        self.variance = (1 - rate) * (self.variance + rate * off.square())

    def state(self) -> tuple[float, ...]:
        """Returns the state to resume from. Waits for the device."""
        return tuple(
            torch.cat((self.mean, self.variance, self.steps[None])).tolist() + self.counts.tolist()
        )

    def check(self, parts: Parts, name: str) -> int:
        """Returns the total number of skipped steps, excluding fp16 overflows.

        Waits for the device. Checks nothing if the device only traces programs, because its values
        would be meaningless.

        Raises:
            RunError: `train.max_consecutive_skips` steps in a row were skipped, weights are not
                finite, or gradients overflow even without loss scaling. Raised on all ranks with
                the same message.
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
            f"some weights are not finite: {', '.join(broken)}"
            if broken
            else "the weights are finite"
        )
        return RunError(
            f"the gradients were not finite at step {last:.0f}: they overflow fp16 even without "
            f"loss scaling (scale {factor:g})",
            where=f"run {name}",
            why=f"{overflowed:,.0f} steps overflowed and were skipped; each one halved the scale; "
            f"{weights}",
            next="lower train.learning_rate or raise train.warmup_steps, or set "
            "train.precision=fp32; then run make train to resume from the last checkpoint",
        )

    def _verdict(self, row: int, last: int, broken: list[str], name: str) -> RunError:
        first, batch = last - row + 1, self.train.global_batch_size
        loss, norm = self.seen.tolist()
        samples = f"samples {(first - 1) * batch} to {last * batch - 1} of the training order"
        cured = (
            "lower train.learning_rate or raise train.warmup_steps; then run make train to "
            "resume from the last checkpoint"
        )
        if broken:
            why = f"some weights are not finite: {', '.join(broken)}"
        else:
            why = (
                f"the weights are finite; those steps used {samples} and were skipped "
                "(train.max_consecutive_skips)"
            )
            cured += f"; run make inspect SAMPLE={(first - 1) * batch} to see the data"
        what = "spiked" if self.seen.isfinite().all() else "were not finite"
        return RunError(
            f"the loss or its gradients {what} in steps {first} to {last} (loss {loss:.4g}, norm "
            f"{norm:.4g})",
            where=f"run {name}",
            why=why,
            next=cured,
        )

    def _broken(self, parts: Parts) -> list[str]:
        """Returns the names of up to four parameters that have non-finite values on any rank.

        Must be called on all ranks.
        """
        found: list[list[str]] = [[]] * self.world.size
        dist.all_gather_object(found, parts.broken(), group=self.world.hosts)
        return sorted({name for names in found for name in names})[:4]


class Scale:
    """Loss scale for fp16 and its counters, kept on the device."""

    def __init__(self, device: torch.device, state: Sequence[float] = ()) -> None:
        """Restores an earlier `state`, so that a resumed run scales the loss identically."""
        factor, good, overflowed, last = state or (START, 0, 0, 0)
        self.factor = torch.tensor(float(factor), device=device)
        self.good = torch.tensor(min(int(good), INTERVAL), dtype=torch.int64, device=device)
        # number of overflowed steps, last overflowed step
        self.counts = torch.tensor((overflowed, last), dtype=torch.int64, device=device)

    def judge(self, step: int, overflowed: Tensor) -> None:
        """Updates the scale after a step.

        `overflowed` is a device bool that is the same on all ranks.
        """
        good = self.good + 1
        grown = torch.where(good >= INTERVAL, (self.factor * GROWTH).clamp(max=MOST), self.factor)
        # Update in place, because `Parts.scale` refers to this tensor.
        self.factor.copy_(torch.where(overflowed, self.factor * BACKOFF, grown))
        self.good = torch.where(overflowed | (good >= INTERVAL), 0, good)
        total, last = self.counts
        self.counts = torch.stack((total + overflowed, torch.where(overflowed, step, last)))

    def state(self) -> tuple[float, ...]:
        """Returns the state to resume from. Waits for the device."""
        return (self.factor.item(), self.good.item(), *self.counts.tolist())

    def meters(self) -> dict[str, float]:
        """Returns the loss scale and the number of overflowed steps, for the metrics."""
        return {"loss_scale": self.factor.item(), "overflowed": int(self.counts[0])}
