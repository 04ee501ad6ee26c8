"""One rank of a run, on NxD's real source and torch_xla's CPU client: `python rank.py RUN_FOLDER`, by torchrun's environment.

NXD_SOURCE is the `src` folder of a checkout of github.com/aws-neuron/neuronx-distributed. Nothing of NxD's or of ours is changed;
only what is closed, and the collectives that a CPU has not, come from closed.py and bridge.py.
"""

from __future__ import annotations

import os
import sys

import bridge
import closed

VERSIONS = {
    "torch-neuronx": "2.9.0.2.15.32035",
    "neuronx-distributed": "0.19.28492",
}  # SDK 2.31's, which are not installed here


def install() -> None:
    os.environ["PJRT_DEVICE"] = "CPU"
    sys.path.insert(0, os.environ["NXD_SOURCE"])
    import torch_xla  # noqa: F401  before what stands in for libneuronxla, which it would ask for

    if not os.environ.get(
        "APART"
    ):  # else the ranks stay strangers, as PJRT's CPU client leaves them
        bridge.install()
    closed.install()
    from trainfleet_nxd import device as neuron_xla

    installed = neuron_xla.version
    neuron_xla.version = lambda name: VERSIONS.get(name) or installed(name)


if __name__ == "__main__":
    install()
    import torch

    torch.set_num_threads(1)
    from trainfleet.engine.__main__ import main
    from trainfleet.models import loss

    loss.LOGITS_BYTES = int(os.environ.get("LOGITS_BYTES") or loss.LOGITS_BYTES)

    code = main(sys.argv[1:])
    print(f"collectives: {dict(bridge.counts)}", flush=True)
    os._exit(code)
