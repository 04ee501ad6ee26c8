"""`python -m trainfleet.devices`: the trial of this machine's CPUs, as JSON; trial.py keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict

from ..output import install
from .products import measure

if __name__ == "__main__":
    install()
    print(json.dumps(asdict(measure())))
