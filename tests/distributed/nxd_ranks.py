"""ranks.py with NxD Core's stand-in (tests/nxd/standin.py): ranks of platform neuron-xla go through trainfleet_nxd on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import ranks

sys.path.append(str(Path(__file__).parents[1] / "nxd"))
import standin

if __name__ == "__main__":
    import trainfleet.engine.__main__  # noqa: F401  imported once, before the forks

    standin.install()
    ranks.run_all(sys.argv[1:])
