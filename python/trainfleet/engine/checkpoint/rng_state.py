"""Saves, restores and seeds the state of every random number generator that a rank may draw
from.
"""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...devices import Device
from ...trust.errors import RunError

# Bytes of the text without torch's generators: 1,249 numbers of ten digits or fewer, and some
# words.
WIDTH = 2**14


def read(device: Device) -> Tensor:
    """Reads the state of all generators of this rank, as the bytes of a text.

    Its length is always the same, since a save is planned once.
    """
    state: dict[str, Any] = {
        "device": device.kind,
        "python": random.getstate(),
        "numpy": [
            part.tolist() if isinstance(part, np.ndarray) else part
            for part in np.random.get_state(legacy=True)
        ],
        "torch": [
            base64.b64encode(generator.get_state().numpy().tobytes()).decode()
            for generator in device.generators()
        ],
    }
    text = json.dumps(state).encode().ljust(WIDTH + sum(map(len, state["torch"])))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def restore(text: Tensor, device: Device) -> bool:
    """Sets all generators to a state of `read`. Returns False, and sets none, if another kind of
    device wrote it.

    Raises:
        RunError: this is not a state of random numbers.
    """
    try:
        state = json.loads(bytes(text.numpy()))
        generators = device.generators()
        if state.get("device", device.kind) != device.kind or len(state["torch"]) != len(
            generators
        ):
            return False
        version, words, gauss = state["python"]
        kind, key, position, *rest = state["numpy"]
        # numpy reads from any position
        if kind != "MT19937" or len(key) != 624 or not 0 <= position <= 624:
            raise ValueError("numpy's is of another kind")
        random.setstate((version, tuple(words), gauss))
        np.random.set_state((kind, np.array(key, np.uint32), position, *rest))
        for generator, encoded in zip(generators, state["torch"], strict=True):
            generator.set_state(_bytes(encoded))
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:  # including RecursionError
        raise RunError(
            "the state of the random numbers can't be read", why=str(error), next="make checkpoints"
        ) from error
    return True


def seed_all(device: Device, seed: int, step: int, rank: int) -> None:
    """Seeds all generators, differently for every seed, step and rank."""
    sequence = np.random.SeedSequence((seed, step, rank)).generate_state(2)
    random.seed(int(sequence[0]))
    np.random.seed(int(sequence[0]))
    for generator in device.generators():
        generator.manual_seed(int(sequence[1]))


def _bytes(encoded: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
