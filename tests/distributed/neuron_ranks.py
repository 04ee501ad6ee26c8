"""ranks.py on devices/neuron.py as it is, with the two names that it takes from TorchNeuron changed: device type and process group.

`torch.neuron` is a stand-in with the functions that torch-neuronx 2.33 has, each by its name; the compiler runs what it is given.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable

import ranks
import torch

from trainfleet.devices import neuron

calls: set[str] = set()


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


def noted(name: str, answer: Callable[..., object]) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        calls.add(name)
        return answer(*arguments)

    return call


def install() -> None:
    functions: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "set_device": lambda index: None,
        "synchronize": lambda: None,
        "max_memory_allocated": lambda: 1 << 20,
        "get_device_properties": lambda index: types.SimpleNamespace(total_memory=24 << 30),
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
        "manual_seed": torch.manual_seed,
    }
    torch.neuron = types.SimpleNamespace(
        Event=Event, **{name: noted(name, call) for name, call in functions.items()}
    )  # type: ignore[attr-defined]
    sys.modules["torch_neuronx"] = types.ModuleType("torch_neuronx")
    neuron.version = lambda name: f"{torch.__version__.split('+')[0]}.3.0"
    neuron.TYPE, neuron.GROUP = "cpu", "gloo"
    torch._dynamo.register_backend(name="neuron")(lambda graph, inputs: graph.forward)


if __name__ == "__main__":
    import trainfleet.engine.__main__  # noqa: F401  imported once, before the forks

    install()
    ranks.run_all(sys.argv[1:])
