"""Runs neuron-monitor next to a node's ranks: keeps its newest reading, and logs errors of the
devices.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from contextlib import suppress

from ..health.neuron_telemetry import Reading, read_monitor
from ..process.processes import die_with_parent
from ..trust.errors import InputError

TOOL = "neuron-monitor"
BESIDE = "/opt/aws/neuron/bin"  # the folder of aws-neuronx-tools


class Monitor:
    """Reads neuron-monitor as long as this process lives; without the tool there are no
    readings.
    """

    def __init__(self) -> None:
        self.newest = Reading()
        tool = shutil.which(TOOL, path=os.pathsep.join([os.environ.get("PATH", ""), BESIDE]))
        if tool is None or os.environ.get("LOCAL_RANK", "0") != "0":  # one per node
            return
        self.process = subprocess.Popen(
            [tool],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        threading.Thread(target=self._follow, name=TOOL, daemon=True).start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # all groups, every 5 seconds
            with suppress(InputError):  # a line that is not a report is ignored
                self.take(read_monitor(line))

    def take(self, reading: Reading) -> None:
        """Keeps a reading, and logs changes since the last one."""
        before, self.newest = self.newest, reading
        if reading.uncorrected > before.uncorrected:
            print(
                f"{TOOL}: {reading.uncorrected - before.uncorrected} uncorrectable memory errors "
                "on this node",
                flush=True,
            )
        if reading.errors:
            print(
                f"{TOOL}: {reading.errors} executions failed, {reading.timed_out} of them timed "
                "out",
                flush=True,
            )
