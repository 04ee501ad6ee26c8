"""Benchmarks this machine's CPUs and prints the result as JSON: `python -m trainfleet.devices`.

hardware/cpu_speed.py caches the result.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from ..trust.safe_output import install
from .cpu import measure

if __name__ == "__main__":
    install()
    print(json.dumps(asdict(measure())))
