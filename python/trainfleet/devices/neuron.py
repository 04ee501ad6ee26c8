"""Trainium 2/3 device: native PyTorch (TorchNeuron), with one logical NeuronCore per rank.

API names follow AWS's TorchNeuron documentation (awsdocs-neuron.readthedocs-hosted.com, SDK 2.33,
2026-10-14): the device and the process group backend `neuron`, `torch.compile(backend="neuron")`,
and a `torch.neuron` module that mirrors torch.cuda.

This code has never run on a Trainium chip. Tests run it on the CPU with the device and process
group backend renamed (tests/distributed/test_neuron.py).

`Monitor` runs neuron-monitor on each node, keeps the latest reading, and logs device errors.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..hardware import node_types
from ..health.neuron_telemetry import Reading, read_monitor
from ..process.processes import die_with_parent
from ..run.run_folder import COMPILED
from ..trust import untrusted_input
from ..trust.errors import InputError, RunError
from .base import COSTLY, Call, Device, DeviceEvent, Dice, this_rank

TYPE, GROUP = "neuron", "neuron"
# first torch-neuronx version based on TorchNeuron; earlier ones are based on PyTorch/XLA
FIRST = (2, 13)

TOOL = "neuron-monitor"
BESIDE = "/opt/aws/neuron/bin"  # where aws-neuronx-tools installs its programs


class Core(Device):
    """Base class of NeuronCore devices, for native PyTorch and for PyTorch/XLA."""

    costly: frozenset[object] = COSTLY
    # The chip lacks 64-bit types, so ranks accumulate losses in fp32, and the host adds up the
    # results.
    loss_sums = torch.float32
    fused_adamw = False  # there is no fused AdamW that supports `found_inf`, which skips a step
    native_bf16, native_fp16, native_fp8 = True, False, False

    def __init__(self) -> None:
        self.name = getattr(node_types.local_accelerator(), "name", "NeuronCore")
        self.monitor = Monitor()

    def meters(self) -> dict[str, float]:
        return self.monitor.newest.metrics() if self.monitor.newest != Reading() else {}

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Returns a core's dense peak FLOP/s from AWS's architecture pages.

        Returns NaN for an unknown core, so that no MFU is reported.
        """
        core = node_types.local_accelerator()
        if core is None:
            return float("nan")
        return core.peak("bf16" if dtype == torch.bfloat16 else "fp32")


class Neuron(Core):
    kind = "neuron"

    def __init__(self, index: int) -> None:
        """Selects a NeuronCore by its index on the node, without initializing the runtime.

        Raises:
            RunError: torch-neuronx is missing, or the installed package is not TorchNeuron.
        """
        super().__init__()
        os.environ.setdefault("NEURON_RT_VISIBLE_CORES", str(index))
        os.environ.setdefault("TORCH_NEURONX_NEFF_CACHE_DIR", str((COMPILED / "neuron").absolute()))
        check_package()
        self.backend = GROUP
        self.torch_device = torch.device(TYPE)  # the only core visible to this process

    @property
    def module(self) -> Any:
        """Returns the `torch.neuron` module, which torch-neuronx adds to torch."""
        return getattr(torch, "neuron")  # noqa: B009  mypy does not know it

    def start(self) -> None:
        import_module("torch_neuronx")  # registers the device, its backend and its compiler
        if not self.module.is_available():
            raise unusable(
                TYPE,
                "torch finds no NeuronCore; check that the driver is loaded and "
                "/dev/neuron0 exists",
            )
        self.module.set_device(0)

    def compiled(self, call: Call, dynamic: bool = False) -> Call:
        # Neuron compiles a separate program for every shape.
        return cast(Call, torch.compile(call, backend="neuron", dynamic=False))

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.torch_device, non_blocking=True)

    def memory_bytes(self) -> int:
        return int(self.module.get_device_properties(0).total_memory)

    def memory_used(self) -> int:
        return int(self.module.max_memory_allocated())

    def synchronize(self) -> None:
        self.module.synchronize()

    def clock(self) -> DeviceEvent:
        event = self.module.Event(enable_timing=True)
        event.record()
        return DeviceEvent(event)

    def generators(self) -> Sequence[Dice]:
        return [torch.default_generator, GeneratorState(self.module)]


class GeneratorState:
    """Default generator of the device, which torch-neuronx exposes through module-level
    functions.
    """

    def __init__(self, module: Any) -> None:
        self.get_state = cast(Callable[[], Tensor], module.get_rng_state)
        self.set_state = cast(Callable[[Tensor], object], module.set_rng_state)
        # the device supports only 32-bit integers
        self.manual_seed = lambda seed: module.manual_seed(seed % 2**31)


def check_package() -> None:
    """Checks that torch-neuronx is TorchNeuron and matches this version of torch.

    Three packages share that name: TorchNeuron, the older PyTorch/XLA plugin for Neuron, and an
    empty package on PyPI.

    Raises:
        RunError: torch-neuronx is missing, is another package, or does not match torch.
    """
    try:
        found = version("torch-neuronx")
    except PackageNotFoundError:
        raise unusable(TYPE, "torch-neuronx is not installed") from None
    if not is_native(found):
        raise unusable(
            TYPE,
            f"torch-neuronx {found} is "
            f"{'the empty package of the public index' if is_stub(found) else 'PyTorch/XLA'}, "
            "not TorchNeuron",
        )
    if numbers(found) != numbers(torch.__version__):
        raise unusable(TYPE, f"torch-neuronx {found} does not match torch {torch.__version__}")


def is_native(version: str) -> bool:
    return numbers(version) >= FIRST


def is_stub(version: str) -> bool:
    """Returns whether this is the version of the empty package on PyPI.

    That package has version 1.0, whereas real releases start at 1.11.
    """
    return numbers(version) < (1, 11)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(
        number
        for part in version.partition("+")[0].split(".")[:2]
        if (number := untrusted_input.whole(part)) is not None
    )


def unusable(platform: str, why: str) -> RunError:
    """Returns the error for a missing NeuronCore, or for missing packages that the plan
    requires.
    """
    return RunError(
        f"this rank can't use a NeuronCore, but the plan requires one (fleet.platform {platform})",
        where=this_rank(),
        why=why,
        next=(
            "run make setup to install the driver and packages on hosts, or make build for an image"
        ),
    )


class Monitor:
    """Background reader for neuron-monitor, which runs until this process exits.

    Provides no readings if the tool is not installed.
    """

    def __init__(self) -> None:
        self.newest = Reading()
        tool = shutil.which(TOOL, path=os.pathsep.join([os.environ.get("PATH", ""), BESIDE]))
        if tool is None or os.environ.get("LOCAL_RANK", "0") != "0":  # one monitor per node
            return
        self.process = subprocess.Popen(
            [tool],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        threading.Thread(target=self._follow, name=TOOL, daemon=True).start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # prints one line for all groups every 5 seconds
            with suppress(InputError):  # skip lines that are not reports
                self.take(read_monitor(line))

    def take(self, reading: Reading) -> None:
        """Stores a reading and logs new errors."""
        before, self.newest = self.newest, reading
        if reading.uncorrected > before.uncorrected:
            print(
                f"{TOOL}: {reading.uncorrected - before.uncorrected} uncorrectable memory errors "
                "on this node"
            )
        if reading.errors:
            print(
                f"{TOOL}: {reading.errors} executions failed, {reading.timed_out} of them timed out"
            )
