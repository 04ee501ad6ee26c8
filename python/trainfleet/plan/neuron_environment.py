"""Defines the environment variables for Neuron's software on a job's nodes, with the page that
documents each value. The functions have no side effects.

Pages are those of awsdocs-neuron.readthedocs-hosted.com, by their names there. SDK 2.31 is the last
that trains on Trn1 (2026-07-07), and 2.33 the newest of TorchNeuron (2026-10-19).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Config
from ..config.neuron_limits import is_xla
from ..config.precision import is_half
from ..run.run_folder import COMPILED
from ..storage import s3
from .fabric_environment import Setting

NATIVE = "neuron"
ENVVARS = "pytorch-neuron-envvars, 2.31"
RUNTIME = "nrt-configurable-parameters, 2.31"


def settings(config: Config) -> tuple[Setting, ...]:
    """Returns the variables that ranks need in addition to the fabric's (fabric_environment.py).
    They are empty on platforms without Neuron.
    """
    if is_xla(config):
        return (*_compiler(config), *_runtime(config), *_left_out())
    return tuple(_native(config)) if config.fleet.platform == NATIVE else ()


def environment(config: Config) -> dict[str, str]:
    """Returns the variables to set, with their values."""
    return {
        setting.name: setting.value for setting in settings(config) if setting.value is not None
    }


def is_recorded(config: Config) -> bool:
    """Tells whether ranks only record their computation for neuron_parallel_compile to compile."""
    return is_xla(config) and config.train.compile_only


def compiles_ahead(config: Config) -> bool:
    """Tells whether a separate job before training compiles the programs into a cache for all
    nodes, because this takes long.
    """
    return is_xla(config) or (
        config.fleet.platform == NATIVE and not cache(config).startswith(s3.SCHEME)
    )


def cache(config: Config) -> str:
    """Returns the location of compiled programs for all nodes: a folder, or s3://bucket/prefix for
    nodes without a shared disk.
    """
    shared, platform = config.fleet.shared_folder, config.fleet.platform
    if shared and shared.startswith(s3.SCHEME):
        return f"{shared.rstrip('/')}/compiled/{platform}"
    return f"{shared or COMPILED.parent.absolute()}/{COMPILED}/{platform}"


def _compiler(config: Config) -> Iterator[Setting]:
    yield Setting(
        "PJRT_DEVICE", "NEURON", "PyTorch/XLA computes on NeuronCores, or fails (torch_xla 2.9)"
    )
    yield Setting(
        "NEURON_COMPILE_CACHE_URL", cache(config), f"compiled programs, for all nodes ({ENVVARS})"
    )
    flags = "--model-type=transformer --retry_failed_compilation"
    yield Setting(
        "NEURON_CC_FLAGS", flags, "a failed compilation is tried again (neuron-caching, 2.31)"
    )
    yield Setting("NEURON_FUSE_SOFTMAX", "1", f"the compiler's own softmax ({ENVVARS})")
    if config.train.compile_only:
        yield Setting(
            "NEURON_PARALLEL_COMPILE_DUMP_RESULTS", "1", f"how long each program took ({ENVVARS})"
        )


def _runtime(config: Config) -> Iterator[Setting]:
    half = is_half(config)
    why = (
        "bf16 weights use stochastic rounding, their fp32 copies are exact"
        if half
        else "nothing is rounded to bf16"
    )
    yield Setting(
        "NEURON_RT_STOCHASTIC_ROUNDING_EN", str(int(half)), f"{why} (neuron-rounding-modes, 2.31)"
    )
    if half:
        yield Setting(
            "NEURON_RT_STOCHASTIC_ROUNDING_SEED", "0", f"the same seed in every run ({ENVVARS})"
        )
    yield Setting(
        "NEURON_RT_EXEC_TIMEOUT",
        "600",
        f"seconds until a program that hangs is an error ({RUNTIME})",
    )
    yield Setting(
        "MALLOC_ARENA_MAX",
        "64",
        "limits fragmentation of the host's memory (AWS's Llama 2 samples, 2026-05-07)",
    )


def _left_out() -> Iterator[Setting]:
    yield Setting(
        "NEURON_RT_ROOT_COMM_ID",
        None,
        "torch_xla sets it to torchrun's master, port 62182 (torch_xla 2.9)",
    )
    yield Setting(
        "NEURON_RT_VISIBLE_CORES",
        None,
        "torch_xla gives each rank the core of its LOCAL_RANK (torch_xla 2.9)",
    )
    why = "in recipes; no effect since SDK 2.31 (runtime release notes, 2026-07-07)"
    yield Setting("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", None, why)
    yield Setting(
        "XLA_DOWNCAST_BF16",
        None,
        "in recipes before torch 2.5, like XLA_USE_BF16; here the model sets its formats",
    )


def _native(config: Config) -> Iterator[Setting]:
    if compiles_ahead(config):
        why = "compiled programs, for all nodes (TorchNeuron's tests; no page names it)"
        yield Setting("TORCH_NEURONX_NEFF_CACHE_DIR", cache(config), why)
    yield Setting(
        "NEURON_RT_VISIBLE_CORES",
        None,
        "each rank takes the core of its LOCAL_RANK (torch-distributed guide, 2.33)",
    )
    yield Setting(
        "NEURON_RT_ROOT_COMM_ID",
        None,
        "the process group finds its port (torch-distributed guide, 2.33)",
    )
    why = (
        "a program that can't be compiled is an error by default (environment variables of "
        "TorchNeuron, 2.33)"
    )
    yield Setting("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", None, why)
