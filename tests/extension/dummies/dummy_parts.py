"""What the dummies' rows name by dotted name: the code of one more family and optimizer."""

from __future__ import annotations

import os

import torch

from trainfleet.config.types import Model
from trainfleet.engine.optimizer import Making
from trainfleet.engine.optimizers import AdamW
from trainfleet.models.llama import Llama

WOUND = "DUMMY_WOUND"  # in the environment: the network breaks


class Giraffe(Llama):
    """Llama with a neck."""

    def __init__(self, shape: Model) -> None:
        super().__init__(shape)
        if WOUND in os.environ:
            raise RuntimeError("moths have eaten the wires")


def lion(of: Making) -> torch.optim.Optimizer:
    return AdamW(of.groups(), **of.settings)
