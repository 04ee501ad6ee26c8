"""Our training beside others': `python tests/bench/bench_train.py [--threads 1|2] [--steps 16] [--rounds 1] [--peers PYTHON]`.

A Llama of 16.9M parameters (vocabulary 8192, width 384, 6 layers), 8 sequences of 256 tokens per step, in turns; each figure is the
median of its steps' tokens/s, then of its rounds. Ours is the whole job: data, guard, vote, metrics; compiled, as any run long enough
is by itself, and in what `train.precision: auto` comes to here unless its name says fp32. It is one node of so many threads; in
how many ranks, follows from the machine (hardware/cpu_speed.py), unless its name says `apart`: a rank for each. PYTHON is an interpreter with
transformers, accelerate and litgpt.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import peers_train as peers

ROOT = Path(__file__).parents[2]
CONFIG = f"""
name: bench
fleet: {{nodes: 1}}
data: {{sources: [stdlib], vocab_size: {peers.VOCABULARY}}}
model: {{preset: small}}
train: {{global_batch_size: {peers.BATCH}, sequence_length: {peers.LENGTH}, validate_every: 0, validation_sequences: 8, log_every: 10}}
checkpoint: {{every: 1000000}}
"""


class Failed(Exception):
    """A job of ours ended badly."""


def prepare(folder: Path, source: str = "stdlib") -> None:
    """The dataset, and a folder to run in."""
    from trainfleet.config import Settings, load
    from trainfleet.data.tokenize_worker import Share, tokenize

    os.chdir(folder)
    Path("config.yaml").write_text(CONFIG.replace("stdlib", source))
    if not Path("data").exists():
        tokenize(load(Settings(Path("config.yaml")))[0].data, Share(0, 1, 1))


def ours(name: str, threads: int, steps: int, settings: str) -> float:
    """Tokens/s of a job of our own on a node of so many threads, from its own results."""
    from trainfleet.config import Settings, dump_resolved, load
    from trainfleet.run import run_folder

    sys.path.append(str(ROOT / "tests/distributed"))
    from ranks import free_port

    config, _ = load(Settings(Path("config.yaml"), f"name={name} train.steps={steps} {settings}"))
    ranks = config.world_size
    run = run_folder.run_of(name)
    run_folder.write_atomic(run.config, dump_resolved(config))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads // ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                                "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "trainfleet.engine", run.folder],
            env=environment | {"RANK": str(rank), "GROUP_RANK": "0"},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        raise Failed(f"the job of run {name} failed; its word is above")
    return float(run.read_results()["tokens_per_second"])


def theirs(name: str, python: str, steps: int, threads: int) -> float:
    program = [python, str(Path(peers.__file__)), name, str(steps), str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    if not told:
        print(f"{name} did not run:\n{done.stdout[-500:]}{done.stderr[-1500:]}")
        return float("nan")
    return float(told[0].removeprefix("== "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peers", default=sys.executable)
    parser.add_argument(
        "--only",
        default="ours,fp32-ours,bare,compiled,hf,litgpt,bare-bf16,compiled-bf16,hf-bf16,litgpt-bf16",
    )
    parser.add_argument("--folder", default=None, help="keeps the dataset and what was compiled")
    told = parser.parse_args()
    folder = Path(told.folder or tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    prepare(folder)
    kinds = {"ours": "train.compile=true", "fp32-ours": "train.compile=true train.precision=fp32",
             "plain-ours": "train.compile=false train.precision=fp32", "eager-ours": "train.compile=false",
             "apart-ours": f"train.compile=true fleet.ranks_per_node={told.threads}"}  # fmt: skip
    found: dict[str, list[float]] = {}
    for turn in range(told.rounds):
        for name in told.only.split(","):
            if name in kinds:
                speed = ours(f"{name}-{turn}-{os.getpid()}", told.threads, told.steps, kinds[name])
            else:
                python = told.peers if name.startswith(("hf", "litgpt")) else sys.executable
                speed = theirs(name, python, told.steps, told.threads)
            found.setdefault(name, []).append(speed)
            print(f"{name}: {speed:,.0f} tokens/s", flush=True)
    best = statistics.median(found.get("bare", [float("nan")]))
    for name, speeds in found.items():
        speed = statistics.median(speeds)
        print(f"{name:14} {speed:8,.0f} tokens/s, {told.threads} cores; {speed / best:.2f} of bare")


if __name__ == "__main__":
    main()
