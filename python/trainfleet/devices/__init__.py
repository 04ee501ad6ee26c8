"""The devices that ranks compute on, each a file; `current` is the only place that chooses."""

from __future__ import annotations

import os

import torch

from .base import Device
from .cpu import Cpu
from .cuda import Cuda

__all__ = ["Device", "current"]


def current() -> Device:
    """This rank's device: GPU number LOCAL_RANK where there are GPUs, else the CPU."""
    return Cuda(int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else Cpu()
