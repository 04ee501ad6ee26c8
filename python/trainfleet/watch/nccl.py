"""What NCCL logs of the fabric, read once in each attempt: does it use it, all its interfaces, and GPUDirect?

Jobs of AWS Batch and SageMaker have NCCL_DEBUG=INFO (backends/request_json.py), as no gate tests their nodes first. On hosts
`make doctor` and the gate have judged the same lines already (nodes/gate.py), and jobs do not log them.
"""

from __future__ import annotations

import time
from pathlib import Path

from ..hardware.node_types import NodeType
from ..plan.fabric_environment import judge_nccl
from ..run.run_folder import Run, node_log, size_of
from ..trust import untrusted_input

MOST = 1 << 22  # bytes of a log's beginning that are read
SAID = "NCCL INFO"


class FabricLog:
    """What the ranks of node 0 log of NCCL from now on."""

    def __init__(self, run: Run, folder: Path, kind: NodeType | None) -> None:
        self.run, self.log, self.kind = run, node_log(folder, 0), kind
        self.start = size_of(self.log)
        self.since, self.heard = time.time(), False

    def wrong(self) -> list[str]:
        """What is wrong with the fabric, returned once: after the first step, as NCCL connects on the first collective."""
        if self.heard or not (self.run.metrics.exists() and self.log.exists()) or self.run.metrics.stat().st_mtime < self.since:
            return []
        self.heard = True
        with untrusted_input.open_regular(self.log) as file:
            file.seek(self.start)
            said = file.read(MOST).decode(errors="replace").splitlines()
        return judge_nccl(said, self.kind) if any(SAID in line for line in said) else []
