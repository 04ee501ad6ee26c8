"""What the key before the store costs: PYTHONPATH=python:tests:tests/unit python tests/bench/bench_meeting.py [PAIRS]

Two torchruns of one rank each start and finish a first all-reduce over gloo on this machine, without a key and with one in turn;
then one client asks the store a thousand times, directly and by way and gate.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from test_meeting import free_port
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainfleet.devices import meeting
from trainfleet.host.install_paths import python_path
from trainfleet.node import relay
from trainfleet.node.placement import LOOPBACK, Seat, torchrun
from trainfleet.plan.fabric_environment import fabric_environment

ASKED, TURNS = 1000, 5
FIRST = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def start(folder: Path, key: str) -> tuple[float, float]:
    """Seconds and CPU seconds from the start of two nodes to their end, with one all-reduce between."""
    (folder / "first.py").write_text(FIRST)
    own = python_path(f"{python_path()['PYTHONPATH']}:{folder}") | fabric_environment(None, "eth9", alone=True)
    environment, port = os.environ | own | ({relay.KEY: key} if key else {}), free_port()
    began, before = time.monotonic(), os.times()
    nodes = [
        subprocess.Popen(torchrun(Seat(node, 2, LOOPBACK, port, address=LOOPBACK), 1, "first", sys.executable), env=environment,
                         cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for node in range(2)
    ]  # fmt: skip
    assert [node.wait() for node in nodes] == [0, 0]
    after = os.times()
    return time.monotonic() - began, sum(after[2:4]) - sum(before[2:4])


def ask(port: int) -> float:
    """Microseconds of one look at a key, the median of several turns."""
    client = TCPStore(LOOPBACK, port, is_master=False)
    client.set("key", "value")
    seconds = []
    for _ in range(TURNS):
        began = time.perf_counter()
        for _ in range(ASKED):
            client.get("key")
        seconds.append((time.perf_counter() - began) / ASKED)
    return statistics.median(seconds) * 1e6


def main(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(pairs):
            (plain, used), (keyed, more) = start(Path(folder), ""), start(Path(folder), "k" * 64)
            print(f"start: {plain:.2f} s, with the key {keyed:.2f}; CPU {used:.2f} s, with the key {more:.2f}", flush=True)
    port = free_port()
    store, own = meeting.guard("k" * 64, LOOPBACK, port, 2)
    print(f"a look at a key: {ask(own):.0f} us, by way and gate {ask(relay.way('k' * 64, LOOPBACK, port)):.0f} us")
    del store


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
