"""Ranks without torchrun: this program imports the engine once and forks N ranks from it, so that a test of them takes seconds.

As a program: `python ranks.py N PORT RUN_FOLDER ...` runs the training job of a run folder with N ranks, one "node" each, and
then those of any more such triples.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from trainfleet.run.run_folder import Run

ROOT = Path(__file__).parents[2]
TEXT = sorted((Path(os.__file__).parent).glob("*.py"))[:40]
CONFIG = """
name: base
data: {name: text, sources: [text], vocab_size: 384, validation_fraction: 0.1}
model: {layers: 2, hidden_size: 48, heads: 4, kv_heads: 2, intermediate_size: 96}
fleet: {nodes: 1}
train: {steps: 20, precision: fp32, global_batch_size: 8, sequence_length: 64, log_every: 1, validate_every: 8, validation_sequences: 6}
checkpoint: {every: 4}
"""


BERT = {
    "model.family": "bert",
    "model.kv_heads": 4,
    "model.tie_word_embeddings": "true",
    "model.dropout": 0.0,
    "model.norm_eps": 1e-5,
}  # what makes an encoder of the bench's model


class Bench:
    """A folder with a dataset, and the runs made in it."""

    def __init__(self, folder: Path, config: str = CONFIG, patience: float = 100) -> None:
        """`patience`: seconds that a run may take."""
        from trainfleet.config import Settings, load
        from trainfleet.data.tokenize_worker import Share, tokenize

        self.folder, self.patience = folder, patience
        (folder / "text").mkdir()
        for file in TEXT:
            shutil.copy(file, folder / "text")
        (folder / "config.yaml").write_text(config)
        os.chdir(folder)
        tokenize(load(Settings(Path("config.yaml")))[0].data, Share(0, 1, 1))

    def prepare(self, name: str, ranks: int, **values: object) -> Path:
        """The folder of a run with its resolved config in it, as `make train` leaves it."""
        from trainfleet.config import Settings, dump_resolved, load
        from trainfleet.run import run_folder

        words = " ".join(
            f"{key}={value}"
            for key, value in {"name": name, "fleet.nodes": ranks, **values}.items()
        )
        config, _ = load(Settings(self.folder / "config.yaml", words))
        run = run_folder.run_of(name, self.folder / "runs")
        run_folder.write_atomic(run.config, dump_resolved(config))
        return run.folder

    def start(self, run: Path, ranks: int, *program: str) -> subprocess.Popen[str]:
        """The ranks of a run; `program` in place of this one, with its own arguments first."""
        port = free_port()
        return subprocess.Popen(
            [sys.executable, *(program or (__file__,)), str(ranks), str(port), str(run)], cwd=self.folder, env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def train_all(self, runs: Sequence[tuple[Path, int]], program: str = __file__) -> str:
        """Trains prepared runs one after another, each with so many ranks, in one program (this one); its output."""
        words = [word for run, ranks in runs for word in (str(ranks), str(free_port()), str(run))]
        done = subprocess.run(
            [sys.executable, program, *words],
            cwd=self.folder,
            env=environment(),
            text=True,
            capture_output=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def train(self, name: str, ranks: int, code: int = 0, **values: object) -> Path:
        """The run folder after training to the end; `values` are config keys with `__` for the dot."""
        run = self.prepare(
            name, ranks, **{key.replace("__", "."): value for key, value in values.items()}
        )
        ended, self.output = self.attempt(run, ranks)
        assert ended == code, self.output
        return run

    def attempt(self, run: Path, ranks: int, *program: str) -> tuple[int, str]:
        """The exit code of the ranks of a run and what they printed; `program` as in `start`."""
        process = self.start(run, ranks, *program)
        output = process.communicate(timeout=self.patience)[0]
        return process.returncode, output


def go_on_after_a_kill(bench: Bench, whole: Path, again: Path, size: int, program: str) -> None:
    """Trains both runs, the second killed at step 10: the checkpoints of step 20 have the same bits."""
    bench.train_all([(whole, size)], program)
    process = bench.start(again, size, program)
    await_step(again, 10, process)
    kill(process)
    bench.train_all([(again, size)], program)
    assert events(again, "resumed")
    last = "checkpoints/step-00000020"
    assert not different(state_of(whole / last), state_of(again / last))


def environment() -> dict[str, str]:
    """What a program of ranks needs: this checkout's package, and one thread each; a crash in native code leaves its stacks."""
    return os.environ | {
        "PYTHONPATH": str(ROOT / "python"),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics without what depends on the clock."""
    keys = ("step", "loss", "tokens", "lr", "grad_norm", "valid_loss")
    return [
        {key: line[key] for key in keys if key in line}
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    ]


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint by name, put together by torch's own reader of safetensors."""
    import torch
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    reader = HuggingFaceStorageReader(str(checkpoint))
    entries = reader.read_metadata().state_dict_metadata.items()
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def leaves(prefix: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(f"{prefix}.{key}" if prefix else key, item)
    else:
        yield prefix, value


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Names of what two states don't have alike, to the last bit."""
    import torch

    def same(a: Any, b: Any) -> bool:
        return (
            torch.equal(a, b)
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
            else bool(a == b)
        )

    return sorted(
        name for name in ours.keys() | theirs.keys() if not same(ours.get(name), theirs.get(name))
    )


def results(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "results.json").read_text()))


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = Run(run).read_events()
    return [line for line in lines if line["event"] == kind]


def await_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Returns once the run has logged a step."""
    await_that(
        lambda: (
            (run / "metrics.jsonl").exists() and any(line["step"] >= step for line in metrics(run))
        ),
        process,
    )


def await_that(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    for _ in range(3000):
        if true():
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError("it never came to that")


def kill(process: subprocess.Popen[str]) -> None:
    """Kill -9 of every rank at once."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def fork(rank: int, ranks: int, port: str, run: str) -> int:
    """The process id of a new rank."""
    if pid := os.fork():
        return pid
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "GROUP_RANK": str(rank),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    from trainfleet.engine.__main__ import main

    code = 1
    try:
        code = main([run])
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def run_all(arguments: list[str]) -> None:
    """Runs each triple of arguments, one after the other; those that failed are told at the end."""
    failed: dict[str, list[int]] = {}
    for first in range(0, len(arguments), 3):
        count, port, run = int(arguments[first]), *arguments[first + 1 : first + 3]
        children = [fork(rank, count, port, run) for rank in range(count)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            failed[run] = codes
    if failed:
        print(f"runs that failed, with the exit codes of their ranks: {failed}", flush=True)
        sys.exit(max((code for codes in failed.values() for code in codes), key=abs))


if __name__ == "__main__":
    import trainfleet.engine.__main__  # noqa: F401  imported once, before the forks

    run_all(sys.argv[1:])
