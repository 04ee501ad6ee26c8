"""Tokenizing a folder of .jsonl files, ours and the peers in turn: wall and CPU seconds, the memory of all processes together.

    python tests/bench/corpus.py CORPUS 260 FOLDER...        # real text of this machine, nothing twice
    python tests/bench/bench_tokenize.py CORPUS --peers PYTHON --megatron CHECKOUT --log tests/bench/LOG.md

PYTHON is an interpreter with datatrove, datasets, transformers and (for Megatron) torch, in an environment of its own. The
tokenizer is a BPE of 32,000 that is trained on the corpus first and given to all as the same tokenizer.json.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "python"


@dataclass(frozen=True)
class Result:
    """One run of one tool. Memory is PSS, so that what processes share counts once; `load` is the machine's before the run."""

    tool: str
    seconds: float
    cpu: float
    memory: float
    output: float
    load: float


def measure(tool: str, command: list[str], folder: Path, environment: dict[str, str]) -> Result:
    """Runs a command in an empty folder and measures it with all its processes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    before, load, began = (
        resource.getrusage(resource.RUSAGE_CHILDREN),
        os.getloadavg()[0],
        time.perf_counter(),
    )
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=os.environ | environment,
            cwd=folder,
            start_new_session=True,
        )
    watch = Watch(process)
    watch.start()
    code = process.wait()
    seconds = time.perf_counter() - began
    watch.join()
    if code:
        raise SystemExit(f"{tool} failed:\n{(folder / 'log').read_text()[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    waited = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    cpu = max(
        waited, sum(watch.cpu.values())
    )  # some tools don't wait for their own children, and the kernel forgets these
    output = sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.suffix in (".bin", ".idx", ".ds", ".index")
    )
    output += sum(path.stat().st_size for path in folder.glob("set/*.arrow"))
    return Result(tool, seconds, cpu, watch.memory, output / 1e6, load)


class Watch(threading.Thread):
    """Looks at all processes of a command ten times a second: the most memory (PSS, MB), and the CPU seconds of each."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__()
        self.process, self.memory, self.cpu = process, 0.0, dict[int, float]()

    def run(self) -> None:
        while self.process.poll() is None:
            pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
            self.memory = max(self.memory, sum(self._look(pid) for pid in pids))
            time.sleep(0.1)

    def _look(self, pid: int) -> float:
        """MB of a process of this session, shared pages in parts; 0 for any other."""
        try:
            if os.getsid(pid) != self.process.pid:
                return 0.0
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            self.cpu[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1000
        except (OSError, StopIteration):
            return 0.0


def ours(corpus: Path, tokenizer: Path, out: Path, workers: int) -> Result:
    from trainfleet.config import Settings, dump_resolved, load

    config = out.parent / "ours.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "name": "bench",
                "data": {"name": "set", "sources": [str(corpus)], "tokenizer": str(tokenizer)},
            }
        )
    )
    resolved = out.parent / "resolved.yaml"
    resolved.write_text(dump_resolved(load(Settings(config))[0]))
    environment = {
        "PYTHONPATH": str(PACKAGE),
        "WORKERS": str(workers),
        "NODES": "1",
        "NODE_RANK": "0",
    }
    return measure(
        "trainfleet", [sys.executable, "-m", "trainfleet.data", str(resolved)], out, environment
    )


def peer(name: str, python: str) -> Callable[[Path, Path, Path, int], Result]:
    def run(corpus: Path, tokenizer: Path, out: Path, workers: int) -> Result:
        command = [
            python,
            str(HERE / "peers.py"),
            name,
            str(corpus),
            str(tokenizer),
            str(out),
            str(workers),
        ]
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return measure(name, command, out, offline)

    return run


def megatron(python: str, checkout: str) -> Callable[[Path, Path, Path, int], Result]:
    def run(corpus: Path, tokenizer: Path, out: Path, workers: int) -> Result:
        joined = out.parent / "joined.jsonl"  # its --input is one file
        if not joined.exists():
            with open(joined, "wb") as file:
                for path in sorted(corpus.glob("*.jsonl")):
                    file.write(path.read_bytes())
        folder = out.parent / "tokenizer"
        folder.mkdir(exist_ok=True)
        shutil.copy(tokenizer, folder / "tokenizer.json")
        settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
        (folder / "tokenizer_config.json").write_text(settings)
        options = [
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            str(folder),
            "--append-eod",
        ]
        command = [python, f"{checkout}/tools/preprocess_data.py", "--input", str(joined), *options]
        command += [
            "--json-keys",
            "text",
            "--workers",
            str(workers),
            "--output-prefix",
            str(out / "set"),
        ]
        return measure(
            "Megatron preprocess_data", command, out, {"TOKENIZERS_PARALLELISM": "false"}
        )

    return run


def train_tokenizer(corpus: Path, path: Path) -> None:
    from trainfleet.config.types import Data
    from trainfleet.data import bpe
    from trainfleet.data.sources import plan_units

    data = Data("bench", (str(corpus),), "text", "bpe", 32_000, 0.01)
    path.write_text(bpe.train(data, plan_units(data)))


def text_megabytes(corpus: Path) -> float:
    import json

    lines = (
        line
        for path in sorted(corpus.glob("*.jsonl"))
        for line in open(path, encoding="utf-8")  # noqa: SIM115
    )
    return sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6


def table(results: list[Result], megabytes: float) -> str:
    best = {
        result.tool: min((r for r in results if r.tool == result.tool), key=lambda r: r.seconds)
        for result in results
    }
    our = best["trainfleet"]
    lines = [
        f"{megabytes:.0f} MB of text, {os.cpu_count()} cores, the best of each tool's runs:",
        "",
        "| tool | wall s | MB/s | CPU s | MB/CPU-s | memory MB | output MB | wall ÷ ours | CPU ÷ ours | load before |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in best.values():
        rates = (
            f"{r.seconds:.1f} | {megabytes / r.seconds:.1f} | {r.cpu:.1f} | {megabytes / r.cpu:.1f}"
        )
        ratios = f"{r.seconds / our.seconds:.1f} | {r.cpu / our.cpu:.1f} | {r.load:.1f}"
        lines.append(f"| {r.tool} | {rates} | {r.memory:.0f} | {r.output:.0f} | {ratios} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--peers", help="an interpreter with datatrove, datasets and transformers")
    parser.add_argument(
        "--megatron", help="a checkout of Megatron-LM, run with the same interpreter"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="of the peers: datatrove, datasets, megatron")
    parser.add_argument(
        "--rounds", type=int, default=1, help="of everything; ours runs before and after each peer"
    )
    parser.add_argument("--log", type=Path, help="a file to append the table to")
    options = parser.parse_args()
    sys.path.insert(0, str(PACKAGE))
    peers = {name: peer(name, options.peers) for name in ("datatrove", "datasets") if options.peers}
    peers |= {"megatron": megatron(options.peers, options.megatron)} if options.megatron else {}
    tools = [tool for name, tool in peers.items() if name in (options.only or peers)]
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer, out, results = (
            Path(scratch, "tokenizer.json"),
            Path(scratch, "out"),
            list[Result](),
        )
        train_tokenizer(options.corpus, tokenizer)
        for tool in [
            ours,
            *(tool for _ in range(options.rounds) for peer in tools for tool in (peer, ours)),
        ]:
            results.append(tool(options.corpus, tokenizer, out, options.workers))
            print(results[-1], flush=True)
        text = table(results, text_megabytes(options.corpus))
    print(text)
    if options.log:
        with open(options.log, "a", encoding="utf-8") as file:
            file.write(
                f"\n### Tokenizing against its peers, {time.strftime('%Y-%m-%d')}\n\n`bench_tokenize.py`: {text}"
            )


if __name__ == "__main__":
    main()
