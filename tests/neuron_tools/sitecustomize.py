"""Has ranks of platform neuron-xla compute on the CPU, where neither torch_xla nor NxD Core is installed: a stand-in for that device alone."""

import os

if "RANK" in os.environ and os.environ.get("PJRT_DEVICE") == "NEURON":
    from trainfleet import devices
    from trainfleet.devices.cpu import Cpu

    class OnCpu(Cpu):
        kind = "neuron_xla"
        executes = "NEURON_EXTRACT_GRAPHS_ONLY" not in os.environ

    devices.KINDS["neuron_xla"] = OnCpu
