"""Trn1 NeuronCore device: PyTorch/XLA, with one core per rank.

NxD Core splits the model. SDK 2.31 is the last one with PyTorch/XLA
(awsdocs-neuron.readthedocs-hosted.com/en/v2.31.0/release-notes/components/pytorch.html,
2026-07-07). It contains torch 2.9, and Neuron's PJRT plug-in in libneuronxla.

This module has never run on a Trainium chip; tests/nxd runs it on CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainfleet.devices.base import Call, Dice
from trainfleet.devices.neuron import Core, is_native, is_stub, numbers, unusable
from trainfleet.hardware import node_types
from trainfleet.trust.errors import RunError

TORCH = (2, 9)  # the only torch version in SDK 2.29 to 2.31


class NeuronXla(Core):
    kind = "neuron_xla"
    backend = "xla"
    lazy = True
    tells_time = False

    def __init__(self, index: int) -> None:
        """Opens the core with this index on the node. `start` creates the PJRT client.

        Raises:
            RunError: torch, torch-xla or torch-neuronx is missing, or its version differs from the
                SDK's.
        """
        check_packages()
        # the job sets all other variables (plan/environment.yaml)
        os.environ.setdefault("PJRT_DEVICE", "NEURON")
        super().__init__()
        # set by neuron_parallel_compile (node/precompile.py)
        self.executes = "NEURON_EXTRACT_GRAPHS_ONLY" not in os.environ

    def start(self) -> None:
        self.xla: Any = import_module("torch_xla")
        self.runtime: Any = import_module("torch_xla.runtime")
        self.model: Any = import_module("torch_xla.core.xla_model")
        self.metrics: Any = import_module("torch_xla.debug.metrics")
        # Importing this registers the xla backend.
        import_module("torch_xla.distributed.xla_backend")
        self.torch_device: torch.device = self.xla.device()

    def joined(self, rank: int, size: int) -> None:
        found = int(self.runtime.global_ordinal()), int(self.runtime.world_size())
        if found != (rank, size):
            raise RunError(
                f"torchrun started rank {rank} of {size}, but PyTorch/XLA sees rank "
                f"{found[0]} of {found[1]}",
                where=f"PJRT_DEVICE={os.environ.get('PJRT_DEVICE', '')}",
                why="its collectives would have no effect, and every rank would train a "
                "separate model",
                next="run pip show libneuronxla on the node, and check that PJRT_DEVICE is NEURON",
            )

    def compiled(self, call: Call, dynamic: bool = False) -> Call:
        return call  # XLA compiles all recorded operations anyway

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        return torch.autocast("xla", dtype=dtype)

    def settle(self) -> None:
        self.xla.sync()

    def compilations(self) -> int:
        found = self.metrics.metric_data("CompileTime")
        return int(found[0]) if found else 0

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.torch_device)

    def memory_bytes(self) -> int:
        core = node_types.local_accelerator()
        return int((core.memory_gib if core else 16) * 2**30)

    def memory_used(self) -> int:
        """Returns the runtime's peak memory use in bytes, or 0 if it is not reported."""
        try:
            found = self.model.get_memory_info(self.torch_device)
        except (RuntimeError, AttributeError):
            return 0
        return int(found.get("peak_bytes_used", found.get("bytes_used", 0)))

    def synchronize(self) -> None:
        self.xla.sync(wait=True)
        self.model.wait_device_ops()

    def generators(self) -> Sequence[Dice]:
        return [torch.default_generator, Seeds(self.model)]


class Seeds:
    """The device's random number generator.

    In PyTorch/XLA, its state is a single number.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def get_state(self) -> Tensor:
        return torch.frombuffer(
            bytearray(int(self.model.get_rng_state()).to_bytes(8, "little")), dtype=torch.uint8
        )

    def set_state(self, state: Tensor, /) -> None:
        self.model.set_rng_state(int.from_bytes(state.numpy().tobytes(), "little"))

    def manual_seed(self, seed: int, /) -> None:
        self.model.set_rng_state(seed % 2**31)


def check_packages() -> None:
    """Checks that the installed packages belong to the last SDK that can train on Trn1.

    Raises:
        RunError: a package is missing, or belongs to a different SDK.
    """
    found = {}
    for name in ("torch", "torch-xla", "torch-neuronx", "neuronx-distributed"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            raise unusable("neuron-xla", f"{name} is not installed") from None
    if numbers(found["torch"]) != TORCH or numbers(found["torch-xla"]) != TORCH:
        raise unusable(
            "neuron-xla",
            f"the SDK needs 2.9 of torch and torch-xla, not torch {found['torch']} and "
            f"torch-xla {found['torch-xla']}",
        )
    neuron = found["torch-neuronx"]
    if is_stub(neuron) or is_native(neuron):
        kind = (
            "an empty placeholder from PyPI"
            if is_stub(neuron)
            else "native PyTorch, which does not support Trn1"
        )
        raise unusable("neuron-xla", f"torch-neuronx {neuron} is {kind}")
    if numbers(found["neuronx-distributed"]) < (0, 10):
        raise unusable(
            "neuron-xla",
            f"neuronx-distributed {found['neuronx-distributed']} is an empty placeholder from PyPI",
        )
