"""What only a GPU can show: `python -m pytest tests/gpu`, on a machine that has one. CI needs none.

`scripts/gpu.py` plays some of it in minutes.

Beside pytest it takes torch (2.11 or newer), numpy, PyYAML, tokenizers, safetensors and tensorboard. Tests of several
ranks need as many GPUs, and those of fp8 need torchao; they skip and say so.

`GPU_TESTS_ON=cpu python -m pytest tests/gpu` has the CPU play the GPU: so the tests themselves are tried where there is none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainfleet import devices
from trainfleet.devices import Device

sys.path.append(str(Path(__file__).parents[1] / "distributed"))

from ranks import Bench

SHAPE = "{layers: 2, hidden_size: 128, heads: 4, kv_heads: 2, intermediate_size: 256}"
CONFIG = f"""
name: base
data: {{name: text, sources: [text], vocab_size: 384, validation_fraction: 0.1}}
model: {SHAPE}
fleet: {{nodes: 1, ranks_per_node: 1, platform: KIND}}
train: {{steps: 8, schedule_steps: 40, warmup_steps: 2, precision: fp32, compile: false, activation_checkpointing: none, global_batch_size: 8,
  micro_batch_size: 4, sequence_length: 128, log_every: 1, validate_every: 4, validation_sequences: 6, parallelism: {{fsdp: 1}}}}
checkpoint: {{every: 4, keep: 100}}
"""


@pytest.fixture(scope="session")
def device() -> Device:
    """The GPU."""
    found = devices.nearest()
    if found.kind == "cpu" and os.environ.get("GPU_TESTS_ON") != "cpu":
        pytest.skip(
            f"torch {torch.__version__} sees no GPU here; GPU_TESTS_ON=cpu tries the tests themselves on the CPU"
        )
    return found


@pytest.fixture(scope="module")
def bench(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One dataset for the runs of a file."""
    here = Path.cwd()
    yield Bench(tmp_path_factory.mktemp("bench"), CONFIG.replace("KIND", device.kind), patience=300)
    os.chdir(here)


@pytest.fixture
def exact(device: Device) -> Iterator[None]:
    """Products of fp32 as fp32, where the device would take TensorFloat-32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
