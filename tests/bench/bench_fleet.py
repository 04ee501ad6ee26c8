"""What a fleet costs by itself: `PYTHONPATH=python python tests/bench/bench_fleet.py [RANKS ...]`, by default 10, 100, 1,000 and 10,000 ranks.

No rank runs: their beats, events and logs are written as they would, 8 ranks a node, and read by the functions that the launcher
and the ranks call. CPU seconds are the least of REPEATS, so that other work on the machine counts little. A vote's time is that of its
messages one after the other, each as long as one is measured to take between two processes here.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trainfleet.engine.world import FAN, levels
from trainfleet.health.heartbeat import Instructions, NodeMemory
from trainfleet.health.heartbeat_format import Beat, Beats, write_beats
from trainfleet.health.watchdog import Watchdog
from trainfleet.hosts.fleet import MOST_NODES
from trainfleet.report.summary import status
from trainfleet.run import records
from trainfleet.run.run_folder import Run
from trainfleet.watch.diagnosis import diagnose, read_lines

LOCAL = 8  # ranks a node
REPEATS = 5
HOP = 60e-6  # seconds from a send to its receipt between two processes of this machine; over EFA about half of it
STAMP = "rank {} 12:00:00.{:03d} | "
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/code/python/trainfleet/engine/trainer.py", line 57, in fit',
    '  File "/venv/torch/distributed/distributed_c10d.py", line 3012, in all_reduce',
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:4521",
)


def cpu(act: Callable[[], object], repeats: int = REPEATS) -> float:
    """CPU seconds of a call, the least of some."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        act()
        found.append(time.process_time() - began)
    return min(found)


def beats_of(ranks: int, step: int) -> dict[int, Beat]:
    return {
        rank: Beat(
            rank, rank // LOCAL, 1, 1, "step", step, 0.1, 1000.0 + step, 1.0, 0.5 + rank % 97 / 1000
        )
        for rank in range(ranks)
    }


def leave(folder: Path, ranks: int, step: int) -> int:
    """Writes the beats of all nodes; their bytes."""
    beats = list(beats_of(ranks, step).values())
    for first in range(0, ranks, LOCAL):
        write_beats(folder, first // LOCAL, 1, beats[first : first + LOCAL])
    return sum(path.stat().st_size for path in (folder / "heartbeats").iterdir())


def beat(folder: Path, ranks: int) -> str:
    """A node's second: its ranks leave their beats, and one of them does the round."""
    node, mine = NodeMemory(folder, 0, 1), list(beats_of(min(ranks, LOCAL), 1).values())

    def second() -> None:
        for one in mine:
            node.leave(one)
            node.read_instructions()
        node.write_instructions(Instructions())
        node.publish(1)

    seconds = cpu(second)
    node.forget()
    size = (folder / "heartbeats" / "node-0").stat().st_size
    return f"beat     {1e6 * seconds / len(mine):10.0f} us a rank and second  {size:9,} bytes a node, 1 file"


def look(folder: Path, ranks: int) -> str:
    """A watchdog's look when all ranks have moved a step, one when none has left a beat, and what it reads."""
    dog, reader = Watchdog(ranks, 0.0), Beats(folder, 1)
    size, taken, reading = leave(folder, ranks, 1), [], []
    for step in range(2, REPEATS + 2):
        leave(folder, ranks, step)
        began = time.process_time()
        new = reader.new()
        reading.append(time.process_time() - began)
        assert len(new) == ranks and dog.look(new, float(step)) is None
        taken.append(time.process_time() - began)
    idle = cpu(lambda: dog.look(reader.new(), float(REPEATS + 1)))
    nodes = -(-ranks // LOCAL)
    return f"look     {1e3 * min(taken):10.2f} ms ({1e3 * min(reading):.2f} reading; {1e3 * idle:.2f} when nothing is new)  {size:9,} bytes, {nodes} files"


def vote(ranks: int) -> str:
    """The messages of a vote: one after the other, and at the busiest rank."""
    found = levels(ranks, LOCAL)
    groups = [max(len(group) for group in level) for level in found]
    hops = 2 * (ranks - 1) if ranks <= FAN else sum(1 + (size - 1).bit_length() for size in groups)
    busiest = hops if ranks <= FAN else sum(2 * (size - 1) for size in groups)
    ring = 2 * (ranks - 1)
    return f"vote     {1e3 * HOP * hops:10.2f} ms: {hops} messages in a row, {busiest} at rank 0; a ring {1e3 * HOP * ring:.1f} ms: {ring}"


def write_failure(folder: Path, ranks: int) -> int:
    """The logs and events of a job all of whose ranks failed; their bytes."""
    (folder / "logs").mkdir(exist_ok=True)
    for first in range(0, ranks, LOCAL):
        own = range(first, min(first + LOCAL, ranks))
        lines = [STAMP.format(rank, rank % 1000) + text for rank in own for text in TRACEBACK]
        (folder / "logs" / f"node-{first // LOCAL}.log").write_text("\n".join(lines) + "\n")
        run = Run(folder, records.node(first // LOCAL, 1))
        for rank in own:
            run.record("fault", rank=rank, node=first // LOCAL, error="RuntimeError", message=TRACEBACK[-1], why="", next="",
                       traceback=list(TRACEBACK))  # fmt: skip
    files = [*(folder / "logs").iterdir(), *(folder / "events").iterdir()]
    return sum(path.stat().st_size for path in files)


def verdict(folder: Path, ranks: int) -> str:
    """One finding from a traceback of every rank."""
    size = write_failure(folder, ranks)

    def judge() -> None:
        lines = [
            line
            for node in range(-(-ranks // LOCAL))
            for line in read_lines(folder / "logs" / f"node-{node}.log", node)
        ]
        assert diagnose(lines)

    return f"verdict  {1e3 * cpu(judge, 1):10.1f} ms  {size:9,} bytes of logs and events"


def stand(folder: Path, ranks: int) -> str:
    """`make status` of that run, and its events merged."""
    run = Run(folder)
    run.metrics.write_text(
        "".join(json.dumps({"step": step, "loss": 3.0}) + "\n" for step in range(1, 1001))
    )
    run.update_results(name="bench", status="failed", nodes=-(-ranks // LOCAL))
    merged = cpu(run.read_events, 2)
    return f"status   {1e3 * cpu(lambda: status(run), 2):10.1f} ms ({1e3 * merged:.1f} merging {-(-ranks // LOCAL)} files of events)"


def plan(ranks: int) -> str:
    """`make plan` of 8B parameters on as many GPUs, whole process."""
    package = Path(__file__).parents[2] / "python"
    nodes, recipe = (
        min(max(1, ranks // LOCAL), MOST_NODES),
        package / "trainfleet" / "recipes" / "llama-3-8b-p5.yaml",
    )
    words = [
        f"CONFIG={recipe}",
        f"NODES={nodes}",
        f"SET=train.global_batch_size={64 * nodes * LOCAL}",
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-m", "trainfleet", "plan", *words], env=os.environ | {"PYTHONPATH": str(package)},
                          capture_output=True, text=True, check=True)  # fmt: skip
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    return (
        f"plan     {1e3 * seconds:10.0f} ms  {len(done.stdout):9,} bytes printed, for {nodes} nodes"
    )


def main(sizes: list[int]) -> None:
    for ranks in sizes:
        print(f"{ranks:,} ranks on {-(-ranks // LOCAL):,} nodes")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for row in (
                beat(folder, ranks),
                look(folder, ranks),
                vote(ranks),
                verdict(folder, ranks),
                stand(folder, ranks),
            ):
                print(f"  {row}", flush=True)
        print(f"  {plan(ranks)}", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [10, 100, 1000, 10_000])
