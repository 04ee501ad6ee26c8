"""Measures this machine's CPUs: `python -m trainfleet.devices` prints JSON, which
hardware/cpu_speed.py caches.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from ..trust.safe_output import install
from .cpu import measure

if __name__ == "__main__":
    install()
    print(json.dumps(asdict(measure())))
