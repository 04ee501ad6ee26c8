"""`python -m trainfleet.devices`: measures this machine's CPUs; JSON, which cpu_speed.py caches."""

from __future__ import annotations

import json
from dataclasses import asdict

from ..output import install
from .products import measure

if __name__ == "__main__":
    install()
    print(json.dumps(asdict(measure())))
