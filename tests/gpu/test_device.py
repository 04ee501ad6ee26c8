"""The device itself: what it says of its memory and clock, its copies, its random numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainfleet.devices import Device
from trainfleet.engine.checkpoint import resuming

MIB = 2**20


def test_it_knows_its_name_peak_and_memory(device: Device) -> None:
    assert device.name and device.upload(np.ones((2, 2))).device.type == device.kind
    for format in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        assert math.isnan(device.peak_flops(format)) or 1e9 < device.peak_flops(format) < 1e17
    assert 0 <= device.memory_used() < device.memory_bytes()


def test_memory_used_is_the_most_that_was_taken(device: Device) -> None:
    before = device.memory_used()
    taken = torch.ones(512 * MIB // 4, device=device.torch_device) * 2
    del taken
    device.synchronize()
    assert device.memory_used() >= before + 400 * MIB


def test_an_accelerators_segments_grow(device: Device) -> None:
    """Fixed blocks would fail on fragmented memory: the setting must have been made before the allocator read it."""
    if device.kind != "cuda":
        pytest.skip("an allocator of CUDA")
    torch.ones(1, device=device.torch_device)
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    assert settings["expandable_segments"] is True, settings


def test_a_batch_arrives_as_it_was(device: Device) -> None:
    array = np.random.default_rng(0).integers(0, 50_000, (64, 1025))
    assert np.array_equal(device.upload(array).cpu().numpy(), array)


def test_the_host_buffer_takes_a_copy_that_is_whole_after_synchronizing(device: Device) -> None:
    tensor = torch.randn(1000, 1000, device=device.torch_device).T
    buffer = device.host_buffer(tensor)
    assert buffer.is_contiguous() and buffer.device.type == "cpu"
    buffer.copy_(tensor, non_blocking=True)
    device.synchronize()
    assert torch.equal(buffer, tensor.cpu())


def test_the_clock_is_the_devices_own(device: Device) -> None:
    """A product that takes the device a while lies between two readings, though the host has long gone on."""
    x = torch.randn(4096, 4096, device=device.torch_device)
    readings = [device.clock()]
    for _ in range(3):
        x = x @ x / 4096
        readings.append(device.clock())
    device.synchronize()
    seconds = [reading - readings[0] for reading in readings]
    assert seconds == sorted(seconds) and seconds[-1] > 1e-5


def test_random_numbers_go_on_where_they_were_saved(device: Device) -> None:
    saved = resuming.read(device)
    drawn = [torch.rand(8, device=device.torch_device), torch.rand(8)]
    assert resuming.restore(saved, device)
    again = [torch.rand(8, device=device.torch_device), torch.rand(8)]
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))


def test_random_numbers_follow_from_seed_step_and_rank(device: Device) -> None:
    drawn = []
    for rank in (0, 1, 0):
        resuming.seed_all(device, 3, 7, rank)
        drawn.append(torch.rand(8, device=device.torch_device))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
