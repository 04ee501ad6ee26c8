"""Trains on NxD's real source, and compares with one process: `python check.py NXD_SOURCE [CASE ...]`, in an environment of its own.

The environment: Python 3.11 with torch 2.9.1, torch_xla 2.9.0, and boto3 requests tenacity safetensors transformers==4.51.* tensorboard
matplotlib zstandard pyyaml tokenizers. NXD_SOURCE: `src` of github.com/aws-neuron/neuronx-distributed (fbac349, 0.18.0).
What is executed and what stands in for what: rank.py, closed.py, bridge.py. The output goes to tests/bench/LOG.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "distributed"), str(HERE.parents[1] / "python")]
import ranks  # noqa: E402

COMMON = {"train.micro_batch_size": 2, "train.epsilon": 1e-3}
XLA = {"fleet.platform": "neuron-xla", "train.spike_sigmas": 0, "train.compile": "false"}
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"train.parallelism.tensor": 2}),
    "dp2-zero1": (2, {"train.parallelism.fsdp": 2, "train.parallelism.zero_stage": 1}),
    "tp2-dp2-sp-recompute": (
        4, {"train.parallelism.tensor": 2, "train.parallelism.fsdp": 2, "train.parallelism.zero_stage": 1, "train.activation_checkpointing": "full"},
    ),
    "pp2": (2, {"train.parallelism.pipeline": 2}),
    "tp4-copied-heads": (4, {"train.parallelism.tensor": 4}),  # Llama has two key-value heads here, each on two ranks; BERT four
}  # fmt: skip
NEAR = 1e-4
PATIENCE, AFTER_ONE = (
    1200.0,
    30.0,
)  # seconds: of the ranks of one start, and of the others once one of them has failed
PIECE = "40000"  # bytes of logits at once: those of 26 tokens of the bench's vocabulary, where a micro-batch has 128
# Models as NxD's own checkpoints have them: the keys that differ from the bench's, tensor ranks, stages (by the converter alone).
FORMATS: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama-fused": ({"kv_heads": 4, "tie_word_embeddings": False}, 2, 2),
    "llama-grouped": ({"tie_word_embeddings": False}, 2, 1),
    "llama-copied": ({"tie_word_embeddings": False}, 4, 3),
    "bert": ({"family": "bert", "kv_heads": 4, "tie_word_embeddings": True, "norm_eps": 1e-12}, 2, 1),
}  # fmt: skip


class Failed(Exception):
    """A case that did not come to its end, with the words of its ranks."""


class Check:
    def __init__(self, source: str, folder: Path, patience: float = PATIENCE) -> None:
        """`patience`: seconds that the ranks of one start may take."""
        self.source, self.bench, self.failed, self.patience = (
            source,
            ranks.Bench(folder),
            False,
            patience,
        )

    def start(self, run: Path, size: int, xla: bool, program: str = "rank.py") -> Ranks:
        words = [str(HERE / program)] if xla else ["-m", "trainfleet.engine"]
        return Ranks(
            [sys.executable, *words, str(run)], size, self.bench.folder, {"NXD_SOURCE": self.source}
        )

    def finish(self, name: str, started: Ranks, code: int | None = 0) -> list[str]:
        """What each rank printed, once all have ended: with this exit code, or any (None)."""
        codes = started.wait(self.patience)
        if code is not None and any(found != code for found in codes):
            raise Failed(f"{name}: exit codes {codes}\n{started.outputs[0][-4000:]}")
        return started.outputs

    def train(self, name: str, size: int, xla: bool, values: Mapping[str, object]) -> Path:
        run = self.bench.prepare(name, size, **COMMON | (XLA if xla else {}) | dict(values))
        self.finish(name, self.start(run, size, xla))
        return run

    def case(self, name: str, do: Callable[[], object]) -> None:
        """Runs a case; one that fails or takes too long is told, and the next one follows."""
        try:
            do()
        except Exception as error:
            self.say(name, False, f"{type(error).__name__}: {error}")

    def compare(self, name: str, ours: Path, theirs: Path) -> None:
        lines = list(zip(ranks.metrics(ours), ranks.metrics(theirs), strict=True))
        far = {
            key: max(abs(a[key] / b[key] - 1) for a, b in lines if key in a and key in b)
            for key in ("loss", "grad_norm", "valid_loss")
        }
        self.say(
            name,
            all(value < NEAR for value in far.values()),
            f"{len(lines)} steps, farthest: {far}",
        )

    def beside(
        self,
        name: str,
        size: int,
        layout: Mapping[str, object],
        values: Mapping[str, object],
        limit: str,
    ) -> None:
        """Compares with one process that has no such limit to its logits (rank.py)."""
        alone = self.train(f"{name}-alone", 1, False, values)
        os.environ["LOGITS_BYTES"] = limit
        try:
            self.compare(name, self.train(name, size, True, {**layout, **values}), alone)
        finally:
            del os.environ["LOGITS_BYTES"]

    def say(self, name: str, good: bool, what: str) -> None:
        self.failed |= not good
        print(f"{'ok  ' if good else 'FAIL'} {name}: {what}", flush=True)

    def upstream(self) -> None:
        """NxD's own resume brings old weights back where the optimizer is loaded before the model; what ours does is `kill`.

        Where the model is first, what is left is that bf16 has of the fp32 copies, which NxD does not save by default.
        """
        outputs = self.finish(
            "upstream", self.start(self.bench.folder / "upstream", 2, True, "upstream.py")
        )
        found = last_object("upstream", outputs[0])
        shows = (
            abs(found["resumed"] - found["whole"]) > 1e-2
            and abs(found["model first"] - found["whole"]) < 1e-3
        )
        self.say(
            "NxD's own resume goes wrong, and not where the model is loaded first",
            shows,
            str(found),
        )

    def world(self) -> None:
        """Without collectives each of torchrun's ranks is alone to torch_xla; ours ends then, and does not train."""
        run = self.bench.prepare("strangers", 2, **COMMON | XLA)
        os.environ["APART"] = "1"
        try:
            processes = self.start(run, 2, xla=True)
            outputs = self.finish("strangers", processes, code=None)
        finally:
            del os.environ["APART"]
        told = [
            line
            for output in outputs
            for line in output.splitlines()
            if "PyTorch/XLA sees rank" in line
        ]
        ended = all(processes.codes) and not (run / "metrics.jsonl").exists()
        self.say(
            "ranks that are strangers to each other end",
            ended and bool(told),
            told[0] if told else outputs[0][-2000:],
        )

    def kill(self, family: str, values: Mapping[str, object]) -> None:
        """A run that is killed goes on to the very state of one that was not."""
        size, layout = LAYOUTS["dp2-zero1"]
        whole = self.bench.folder / "runs" / f"{family}-dp2-zero1"
        run = self.bench.prepare(f"{family}-killed", size, **COMMON | XLA | layout | dict(values))
        with self.start(run, size, xla=True) as started:
            deadline = time.monotonic() + self.patience
            while not (run / "metrics.jsonl").exists() or len(ranks.metrics(run)) < 10:
                if not started.alive() or time.monotonic() > deadline:
                    raise Failed(f"{family} kill -9: never at step 10\n{started.stop()[0][-4000:]}")
                time.sleep(0.05)
        self.train(f"{family}-killed", size, True, {**layout, **values})
        last = "checkpoints/step-00000020"
        different = ranks.different(ranks.state_of(run / last), ranks.state_of(whole / last))
        resumed = [line["step"] for line in ranks.events(run, "resumed")]
        self.say(
            f"{family} kill -9",
            bool(resumed) and not different,
            f"resumed at {resumed}, different: {different}",
        )

    def cross(self, family: str, values: Mapping[str, object]) -> None:
        """A checkpoint of NxD's layout is one of torch's: the CPU goes on with it, and evaluates to what NxD did."""
        whole = self.bench.folder / "runs" / f"{family}-tp2"
        more = self.train(f"{family}-cpu-from-nxd", 1, False, {**values, "train.init_from": f"{whole}", "train.steps": 1,
                                                              "train.learning_rate": 1e-12, "train.validate_every": 1})  # fmt: skip
        ours, theirs = ranks.metrics(more)[-1]["valid_loss"], ranks.metrics(whole)[-1]["valid_loss"]
        self.say(
            f"{family} NxD -> torch",
            abs(ours / theirs - 1) < NEAR,
            f"validation {ours:.6f}, NxD's {theirs:.6f}",
        )

    def formats(self, name: str) -> None:
        """Our checkpoint → NxD's → ours and Hugging Face's: the same bytes, and NxD makes of it what transformers does."""
        from trainfleet import models
        from trainfleet.config import huggingface_config as shapes
        from trainfleet.config import load_resolved
        from trainfleet.models import huggingface_weights
        from trainfleet_nxd import folder as nxd_folder
        from trainfleet_nxd import weights as nxd_files
        from trainfleet_nxd.weights import Degrees

        keys, tensor, stages = FORMATS[name]
        shape = replace(
            load_resolved(self.bench.prepare(f"{name}-shape", 1) / "config.yaml").model,
            **{"layers": 3, **keys},
        )
        folder = self.bench.folder / name
        (folder / "hf").mkdir(parents=True)
        huggingface_weights.save(model := models.build(shape), shape.family, folder / "hf")
        (folder / "hf/config.json").write_text(json.dumps(shapes.write(shape)))
        whole = huggingface_weights.outgoing(model, shape.family)
        nxd_files.save(whole, shape, Degrees(tensor, 1), folder / "ours")
        found = last_object(
            name, self.finish(name, self.start(folder, tensor, True, "formats.py"))[0]
        )
        self.say(
            f"{name}, TP {tensor}: what NxD makes of ours",
            abs(found["NxD"] / found["transformers"] - 1) < NEAR,
            str(found),
        )
        for saved in ("plain", "apart"):
            back, tag = models.build(shape), nxd_folder.tag_of(str(folder / saved))
            assert tag
            back.load_state_dict(
                nxd_files.load(tag, shape, huggingface_weights.sizes_of(back.named_parameters())),
                strict=False,
            )
            again = folder / f"{saved}-hf"
            again.mkdir()
            huggingface_weights.save(back, shape.family, again)
            same = (again / huggingface_weights.WEIGHTS).read_bytes() == (
                folder / "hf" / huggingface_weights.WEIGHTS
            ).read_bytes()
            self.say(
                f"{name}, TP {tensor}: saved by NxD ({saved}), read by us, as Hugging Face's",
                same,
                "the same bytes" if same else "other bytes",
            )
        if shape.family == "llama":
            self.convert(name, folder, whole, shape, Degrees(tensor, stages))

    def convert(
        self, name: str, folder: Path, whole: dict[str, Any], shape: Any, degrees: Any
    ) -> None:
        """AWS's converter cuts a whole as we do, and makes of our slices the whole."""
        import shutil

        import torch

        from trainfleet_nxd import folder as nxd_folder
        from trainfleet_nxd import weights as nxd_files

        shutil.rmtree(folder / "ours")
        nxd_files.save(whole, shape, degrees, folder / "ours")
        words = [str(folder), str(degrees.tensor), str(degrees.pipeline)]
        done = subprocess.run([sys.executable, str(HERE / "formats.py"), *words], env=ranks.environment() | {"NXD_SOURCE": self.source},
                              capture_output=True, text=True, timeout=self.patience)  # fmt: skip
        if done.returncode:
            raise Failed(f"{name}: the converter: {(done.stdout + done.stderr)[-4000:]}")
        merged = torch.load(folder / "merged.pt")
        self.say(
            f"{name}, {degrees}: our slices, merged by AWS's converter",
            not ranks.different(merged, whole),
            f"{len(merged)} tensors",
        )
        ours, theirs = (
            nxd_folder.files_of(folder / each) for each in ("ours/pretrained_weight", "converted")
        )
        differ = {
            place: ranks.different(torch.load(ours[place]), torch.load(theirs[place]))
            for place in theirs
        }
        good = ours.keys() == theirs.keys() and not any(differ.values())
        self.say(
            f"{name}, {degrees}: slices by AWS's converter and by us",
            good,
            f"{len(theirs)} files" if good else str(differ),
        )


class Ranks:
    """Processes that meet at a store of ours: it listens before they start, on a port that the system chose, as torchrun's does."""

    def __init__(
        self, words: Sequence[str], size: int, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.files = [tempfile.TemporaryFile("w+") for _ in range(size)]  # noqa: SIM115 - read when the ranks have ended
        self.codes: list[int | None] = [None] * size
        self.processes = []
        for rank, file in enumerate(self.files):
            place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0,
                     "MASTER_PORT": self.store.port, "TORCHELASTIC_RESTART_COUNT": 0}  # fmt: skip
            told = {name: str(value) for name, value in place.items()} | {
                "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "True", **environment,
            }  # fmt: skip
            self.processes.append(
                subprocess.Popen(
                    words,
                    cwd=folder,
                    env=ranks.environment() | told,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *reason: object) -> None:
        self.stop()

    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def wait(self, patience: float) -> list[int | None]:
        """The exit codes; ranks that others wait for in vain, or that take too long, are killed."""
        deadline = time.monotonic() + patience
        while (
            any(process.poll() is None for process in self.processes)
            and time.monotonic() < deadline
        ):
            if any(process.returncode for process in self.processes):
                deadline = min(deadline, time.monotonic() + AFTER_ONE)
            time.sleep(0.05)
        self.stop()
        return self.codes

    def stop(self) -> list[str]:
        """Kill -9 of those that are left; what each has printed."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.codes = [process.wait() for process in self.processes]
        return self.outputs

    @property
    def outputs(self) -> list[str]:
        for file in self.files:
            file.seek(0)
        return [file.read() for file in self.files]


def last_object(name: str, output: str) -> dict[str, Any]:
    """The last line of JSON that a rank printed."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise Failed(f"{name}: {output[-4000:]}")
    return dict(json.loads(lines[-1]))


def main(source: str, cases: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        check = Check(str(Path(source).absolute()), Path(folder))
        every: dict[str, Callable[[], object]] = {"upstream": check.upstream, "world": check.world}
        every |= {f"format-{name}": partial(check.formats, name) for name in FORMATS}
        for family, values in (("llama", {}), ("bert", ranks.BERT)):
            every |= dict(trained(check, family, values))
        for name, do in every.items():
            if not cases or name in cases:
                check.case(name, do)
        return int(check.failed)


def trained(
    check: Check, family: str, values: Mapping[str, object]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """A family's cases by name; each trains what it is compared with, where no case before it has."""
    alone = cache(partial(check.train, f"{family}-alone", 1, False, values))
    layout = cache(
        lambda name: check.train(
            f"{family}-{name}", LAYOUTS[name][0], True, {**LAYOUTS[name][1], **values}
        )
    )
    for name in LAYOUTS:
        yield (
            f"{family}-{name}",
            lambda name=name: check.compare(f"{family} {name}", layout(name), alone()),
        )
    if family == "llama":
        yield from decoded(check, values)
    yield f"{family}-kill", lambda: (layout("dp2-zero1"), check.kill(family, values))
    yield f"{family}-cross", lambda: (layout("tp2"), check.cross(family, values))


def decoded(
    check: Check, values: Mapping[str, object]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What only models of the next token have: logits in pieces, and documents apart."""
    few = {"train.steps": 4, "train.validate_every": 2, **values}
    apart = few | {"train.document_mask": "true"}
    for name, told, limit in (
        ("dp2-zero1", few, PIECE),
        ("pp2", few, PIECE),
        ("dp2-zero1", apart, ""),
        ("tp2", apart, ""),
    ):
        case = f"llama-{'pieces' if limit else 'documents'}-{name}"
        yield case, partial(check.beside, case, *LAYOUTS[name], told, limit)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(HERE.parents[1] / "python")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
