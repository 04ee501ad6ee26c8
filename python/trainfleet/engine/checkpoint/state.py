"""What a checkpoint holds of a run: the model, the optimizer's moments and every rank's random numbers.

Everything else is in the marker, or follows from the step: the learning rate, and which samples come next. What the config
says of the optimizer is not part of the state either, so that another weight decay takes effect when the config says so.
"""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ...devices import Device
from ...errors import RunError

State = dict[str, Any]
# Every moment under its parameter's name: so ranks that hold different parameters, as pipeline stages do, save and load together.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
MOMENTS = "state."  # what is not of the config in an optimizer's state_dict


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The live tensors of the model and the optimizer, each under a name that no layout changes."""
    moments = get_optimizer_state_dict(model, optimizer, options=BY_NAME)
    return {
        "model": get_model_state_dict(model),
        "optimizer": {name: value for name, value in moments.items() if name.startswith(MOMENTS)},
    }


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Makes a state of `collect`, filled from a checkpoint, the state of the model and the optimizer."""
    set_model_state_dict(model, state["model"])
    settings = get_optimizer_state_dict(model, optimizer, options=BY_NAME)
    set_optimizer_state_dict(model, optimizer, settings | state["optimizer"], options=BY_NAME)


def read_random(device: Device) -> str:
    """The state of all random numbers that this rank may draw, as text."""
    state: State = {
        "device": device.kind,
        "python": random.getstate(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state(legacy=True)],
        "torch": [base64.b64encode(generator.get_state().numpy().tobytes()).decode() for generator in device.generators()],
    }
    return json.dumps(state)


def set_random(text: object, device: Device) -> bool:
    """Goes on with the random numbers where `read_random` found them; whether it could: each kind of device has its own.

    Raises:
        RunError: this is no state of random numbers.
    """
    try:
        state = json.loads(text if isinstance(text, str) else "")
        generators = device.generators()
        if state.get("device", device.kind) != device.kind or len(state["torch"]) != len(generators):
            return False
        version, words, gauss = state["python"]
        kind, key, position, *rest = state["numpy"]
        if kind != "MT19937" or len(key) != 624 or not 0 <= position <= 624:  # numpy reads wherever this points
            raise ValueError("numpy's is of another kind")
        random.setstate((version, tuple(words), gauss))
        np.random.set_state((kind, np.array(key, np.uint32), position, *rest))
        for generator, encoded in zip(generators, state["torch"], strict=True):
            generator.set_state(_bytes(encoded))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:  # RecursionError among them
        raise RunError("the state of the random numbers can't be read", why=str(error), next="make checkpoints") from error
    return True


def seed_random(device: Device, seed: int, step: int, rank: int) -> None:
    """Begins all random numbers anew, differently for every seed, step and rank."""
    sequence = np.random.SeedSequence((seed, step, rank)).generate_state(2)
    random.seed(int(sequence[0]))
    np.random.seed(int(sequence[0]))
    for generator in device.generators():
        generator.manual_seed(int(sequence[1]))


def _bytes(encoded: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
