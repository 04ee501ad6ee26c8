"""Learning rate schedules: a linear warm-up to the peak, then a decay to the minimum."""

from __future__ import annotations

import math
from collections.abc import Callable

from .types import Config, Refusals, Train

# minimum ratio; smaller values are assumed to be absolute rates, as in other programs
LEAST_RATIO = 0.001


def learning_rate(train: Train, step: int) -> float:
    """Returns the learning rate of a step, counted from 1.

    The rate reaches its minimum at the last of `train.schedule_steps`.
    """
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    step = min(step, train.schedule_steps)
    done = (step - train.warmup_steps) / max(1, train.schedule_steps - train.warmup_steps)
    height = FALLS[train.schedule](train, done, step)
    return train.learning_rate * (train.min_lr_ratio + (1 - train.min_lr_ratio) * height)


# Fraction of the peak at a step, with the completed fraction of the decay.
FALLS: dict[str, Callable[[Train, float, int], float]] = {
    "cosine": lambda train, done, step: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda train, done, step: 1 - done,
    # fairseq's polynomial_decay
    "polynomial": lambda train, done, step: float((1 - done) ** train.schedule_power),
    # Warmup-stable-decay (Hu et al. 2024, arXiv:2404.06395): a constant rate that decays linearly
    # in the last steps.
    "wsd": lambda train, done, step: min(1.0, (train.schedule_steps - step) / train.decay_steps),
}


def check(config: Config) -> Refusals:
    """Rejects step counts that contradict each other, and a minimum that looks like an absolute
    rate.
    """
    train, ratio = config.train, config.train.min_lr_ratio / config.train.learning_rate
    if 0 < train.min_lr_ratio < LEAST_RATIO:
        share = f"{train.min_lr_ratio:g} / {train.learning_rate:g} is {ratio:.3g}"
        meant = f"did you mean {ratio:.3g}? {share}" if ratio <= 1 else f"use {LEAST_RATIO}, or 0"
        what = f"{train.min_lr_ratio:g} is read as a fraction of train.learning_rate"
        yield "train.min_lr_ratio", f"{what}; {meant}"
    if train.warmup_steps > train.schedule_steps:
        yield (
            "train.warmup_steps",
            f"{train.warmup_steps} is more than train.schedule_steps {train.schedule_steps}",
        )
    if train.schedule_steps < train.steps:
        yield (
            "train.schedule_steps",
            f"{train.schedule_steps} is less than train.steps {train.steps}",
        )
    if train.schedule == "wsd" and train.warmup_steps + train.decay_steps > train.schedule_steps:
        room = train.schedule_steps - train.warmup_steps
        yield (
            "train.decay_steps",
            f"{train.decay_steps} steps do not fit after a warm-up of {train.warmup_steps}; "
            f"use at most {room}",
        )
