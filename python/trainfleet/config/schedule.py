"""Learning rate schedules: a linear warm-up to the peak, then a decay to the minimum."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .types import Config, Train

LEAST_RATIO = 0.001  # minimum ratio; smaller values must be absolute rates, as in other programs


def learning_rate(train: Train, step: int) -> float:
    """Returns the learning rate of a step, counted from 1.

    The rate reaches its minimum at the last of `train.schedule_steps`.
    """
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    height = FALLS[train.schedule](train, min(step, train.schedule_steps))
    return train.learning_rate * (train.min_lr_ratio + (1 - train.min_lr_ratio) * height)


def _done(train: Train, step: int) -> float:
    """Returns the completed fraction of the decay at a step."""
    return (step - train.warmup_steps) / max(1, train.schedule_steps - train.warmup_steps)


def _cosine(train: Train, step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * _done(train, step)))


def _linear(train: Train, step: int) -> float:
    return 1 - _done(train, step)


def _polynomial(train: Train, step: int) -> float:
    """Implements fairseq's polynomial_decay."""
    return float((1 - _done(train, step)) ** train.schedule_power)


def _wsd(train: Train, step: int) -> float:
    """Implements warmup-stable-decay (WSD): a constant rate that decays linearly in the last steps.

    See Hu et al. 2024, arXiv:2404.06395.
    """
    return min(1.0, (train.schedule_steps - step) / train.decay_steps)


FALLS = {"cosine": _cosine, "linear": _linear, "polynomial": _polynomial, "wsd": _wsd}


def check(config: Config) -> Iterator[tuple[str, str]]:
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
