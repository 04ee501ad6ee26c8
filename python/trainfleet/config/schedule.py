"""The learning rate as a function of the step: a linear warm-up to the peak, and then one of four
ways down to the floor.
"""

from __future__ import annotations

import math

from .types import Train


def learning_rate(train: Train, step: int) -> float:
    """The rate of step 1, 2, ...; the floor is reached in the last of `train.schedule_steps`."""
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    height = FALLS[train.schedule](train, min(step, train.schedule_steps))
    return train.learning_rate * (train.min_lr_ratio + (1 - train.min_lr_ratio) * height)


def _done(train: Train, step: int) -> float:
    """The fraction of the decay that is done at a step."""
    return (step - train.warmup_steps) / max(1, train.schedule_steps - train.warmup_steps)


def _cosine(train: Train, step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * _done(train, step)))


def _linear(train: Train, step: int) -> float:
    return 1 - _done(train, step)


def _polynomial(train: Train, step: int) -> float:
    """fairseq's polynomial_decay."""
    return float((1 - _done(train, step)) ** train.schedule_power)


def _wsd(train: Train, step: int) -> float:
    """Warm-up, stable, decay: flat until the last steps, which fall in a straight line (Hu et al.
    2024, arXiv:2404.06395).
    """
    return min(1.0, (train.schedule_steps - step) / train.decay_steps)


FALLS = {"cosine": _cosine, "linear": _linear, "polynomial": _polynomial, "wsd": _wsd}
