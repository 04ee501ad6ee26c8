"""Ranks as `ranks.py` forks them, on a CPU that says it has fp8, as torch computes such products there too, if slowly."""

from __future__ import annotations

import sys

import ranks

import trainfleet.engine.__main__  # noqa: F401  imported once, before the forks
from trainfleet.devices.cpu import Cpu

if __name__ == "__main__":
    Cpu.native_fp8 = True
    ranks.run_all(sys.argv[1:])
