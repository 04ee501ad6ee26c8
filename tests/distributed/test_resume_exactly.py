"""Train 2N steps, or train, be killed at a random moment, and go on: every logged number, every sequence, every bit is the same.

And on another layout: the state is the same to the last bit, and the sequences of every step are. All through the real trainer.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from ranks import Bench

STEPS = 12
COMMON = {
    "train.steps": STEPS,
    "train.validate_every": 5,
    "checkpoint.every": 2,
    "train.micro_batch_size": 2,
    "model.layers": 4,
}
LEARNT = {
    "model.kv_heads": 4,
    "model.dropout": 0.1,
    "model.tie_word_embeddings": "true",
}  # positions, and dropout: random numbers
GPT2, BERT = {"model.family": "gpt2", **LEARNT}, {"model.family": "bert", **LEARNT}
HALF = {"train.precision": "bf16", "train.param_dtype": "bf16"}


def layout(**degrees: int) -> dict[str, object]:
    return {f"train.parallelism.{name}": degree for name, degree in degrees.items()}


CASES: dict[str, tuple[int, dict[str, object]]] = {
    "alone": (1, {}),
    "ddp2": (2, {}),
    "ddp4": (4, {}),
    "fsdp2": (2, layout(fsdp=2)),
    "fsdp4": (4, layout(fsdp=4)),
    "zero1": (2, layout(fsdp=2, zero_stage=1)),
    "hsdp": (4, layout(fsdp=2)),
    "tp2": (2, layout(tensor=2)),
    "fsdp2-tp2": (4, layout(fsdp=2, tensor=2)),
    "pp2": (2, layout(pipeline=2)),
    "interleaved": (2, layout(pipeline=2, virtual_stages=2)),
    "pp2-tp2": (4, layout(pipeline=2, tensor=2)),
    "cp2": (2, layout(context=2)),
    "muon": (2, {"train.optimizer": "muon"}),
    "lamb": (2, {"train.optimizer": "lamb"}),
    "gpt2-dropout": (2, GPT2),
    "gpt2-dropout-fsdp2": (2, GPT2 | layout(fsdp=2)),
    "bert-dropout-alone": (1, BERT),
    "bert-dropout": (2, BERT),
    "bert-dropout-4": (4, BERT),
    "bert-dropout-fsdp2": (2, BERT | layout(fsdp=2)),
    "half-weights": (2, HALF),
    "half-weights-fsdp2-tp2": (4, HALF | layout(fsdp=2, tensor=2)),
    "half-weights-pp2": (2, HALF | {"model.tie_word_embeddings": "true"} | layout(pipeline=2)),
    "hsdp-tp2": (8, layout(fsdp=2, tensor=2)),
    "gpt2-dropout-tp2": (2, GPT2 | layout(tensor=2)),
    "gpt2-dropout-pp2": (2, GPT2 | layout(pipeline=2)),
    "bert-dropout-tp2": (2, BERT | layout(tensor=2)),
    "bert-dropout-pp2": (2, BERT | layout(pipeline=2)),
}
# Odd numbers everywhere: three layers, 389 tokens, 42 and 20 features, over degrees of 2, 3 and 4.
ODD = {"model.layers": 3, "model.vocab_size": 389, "model.hidden_size": 20, "model.heads": 2, "model.kv_heads": 2,
       "model.intermediate_size": 42, "train.global_batch_size": 12, "train.micro_batch_size": 1, "train.warmup_steps": 2,
       "train.schedule_steps": STEPS, "checkpoint.keep": 100}  # fmt: skip
CHAINS: dict[str, list[tuple[int, dict[str, object]]]] = {
    "4-2-1-4": [(4, {}), (2, {}), (1, {}), (4, layout(fsdp=4))],
    "dp4-dp2xtp2-pp2-fsdp3": [
        (4, {}),
        (4, layout(tensor=2)),
        (2, layout(pipeline=2)),
        (3, layout(fsdp=3)),
    ],
}


class Witness:
    """Runs that one program trains, one after the other, while tests wait for the one that they judge.

    Each is [ranks, run folder, "whole" or "killed", its config]: of one run there may be several, each going on with the last.
    """

    def __init__(self, bench: Bench, plan: list[tuple[int, Path, str, str]]) -> None:
        (file := bench.folder / "plan.json").write_text(json.dumps(plan, default=str))
        self.seed = os.environ.get("SEED") or str(random.SystemRandom().randrange(10**6))
        command = [
            sys.executable,
            str(Path(__file__).with_name("killing.py")),
            self.seed,
            str(file),
        ]
        self.log = open(bench.folder / "log", "a+")  # noqa: SIM115  as long as the program runs
        self.program = subprocess.Popen(
            command,
            cwd=bench.folder,
            env=ranks.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
        )
        self.told: dict[str, list[dict[str, Any]]] = {}

    def of(self, run: Path, times: int = 1) -> dict[str, Any]:
        """What was said of a run, once it was trained so many times."""
        assert self.program.stdout
        while len(self.told.get(run.name, [])) < times:
            line = self.program.stdout.readline()
            assert line, self.trace()
            if line.startswith('{"run"'):
                told = json.loads(line)
                self.told.setdefault(told["run"], []).append(told)
        told = self.told[run.name][-1]
        if any(told["codes"]):
            print(self.trace())  # whole, as pytest cuts what an assertion holds
        assert not any(told["codes"]), told
        return dict(told)

    def trace(self) -> str:
        return f"SEED={self.seed} kills at the same steps again\n{Path(self.log.name).read_text()[-20_000:]}"

    def close(self) -> None:
        os.killpg(self.program.pid, signal.SIGKILL)
        self.program.wait()
        self.log.close()


def sequences(run: Path) -> dict[tuple[int, int], str]:
    """The digest of every sequence by step and place, when all ranks and all attempts saw the same one there."""
    found: dict[tuple[int, int], str] = {}
    for path in (run / "witness").glob("batches-*.txt"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a kill may cut a line
                step, place, digest = line.split()
                assert found.setdefault((int(step), int(place)), digest) == digest, (
                    f"step {step} had two sequences at {place}"
                )
    return found


@pytest.fixture(scope="module")
def cases(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Witness]:
    """Two runs for each case that is to be judged: one whole, one killed on its way."""
    chosen = {
        item.callspec.params.get("name")
        for item in request.session.items
        if hasattr(item, "callspec")
    }
    plan = [
        (size, bench.prepare(f"{name}.{kind}", size, **(COMMON | values)), kind, "")
        for name, (size, values) in CASES.items()
        if name in chosen
        for kind in ("whole", "killed")
    ]
    yield (witness := Witness(bench, plan))
    witness.close()


@pytest.mark.parametrize("name", CASES)
def test_killed_at_a_random_moment_it_goes_on_bit_for_bit(
    bench: Bench, cases: Witness, name: str
) -> None:
    whole, killed = (bench.folder / "runs" / f"{name}.{kind}" for kind in ("whole", "killed"))
    cases.of(whole)
    told = cases.of(killed)
    assert 2 <= told["killed_at"] < STEPS and ranks.results(killed)["status"] == "finished"
    assert ranks.metrics(killed) == ranks.metrics(whole), told
    assert sequences(killed) == sequences(whole) and len(sequences(whole)) >= STEPS * 8
    ours, theirs = (
        ranks.state_of(run / "checkpoints" / f"step-{STEPS:08d}") for run in (killed, whole)
    )
    assert any("random" in key for key in ours) and ranks.different(ours, theirs) == [], told


def test_most_of_the_killed_went_on_from_a_checkpoint(cases: Witness) -> None:
    """A kill may come before the first commit; but what goes on from nothing proves nothing."""
    resumed = [
        told["resumed"] for several in cases.told.values() for told in several if told["killed_at"]
    ]
    assert sum(resumed) > len(resumed) / 2


@pytest.fixture(scope="module")
def chains(bench: Bench) -> Iterator[Witness]:
    """Each chain's run, three steps in each layout, and one that never changes."""
    plan = [(1, bench.prepare("unbroken", 1, **(COMMON | ODD)), "whole", "")]
    for name, chain in CHAINS.items():
        for place, (size, degrees) in enumerate(chain):
            more = {"train.steps": 3 * (place + 1), "checkpoint.every": 3}
            run = bench.prepare(name, size, **(COMMON | ODD | more | degrees))
            config = (run / "config.yaml").rename(bench.folder / f"{name}-{place}.yaml")
            plan.append((size, run, "whole", str(config)))
    yield (witness := Witness(bench, plan))
    witness.close()


@pytest.mark.parametrize("name", CHAINS)
def test_another_layout_has_the_same_state_and_the_same_batches(
    bench: Bench, chains: Witness, name: str
) -> None:
    run, unbroken = bench.folder / "runs" / name, bench.folder / "runs" / "unbroken"
    chains.of(unbroken)
    chains.of(run, len(CHAINS[name]))
    for step in (3, 6, 9):
        saved = ranks.state_of(run / "checkpoints" / f"step-{step:08d}")
        resumed: dict[str, torch.Tensor] = {}
        for path in (run / "witness").glob(f"state-{step}-0-*.pt"):
            for key, tensor in torch.load(path).items():
                assert torch.equal(resumed.setdefault(key, tensor), tensor), (
                    f"{key} differs among the ranks"
                )
        assert (
            ranks.different(
                resumed,
                {key: value for key, value in saved.items() if not key.startswith("random")},
            )
            == []
        )
    assert sequences(run) == sequences(unbroken) and len(sequences(unbroken)) == STEPS * 12
    for ours, theirs in zip(ranks.metrics(run), ranks.metrics(unbroken), strict=False):
        assert (ours["step"], ours["tokens"], ours["lr"]) == (
            theirs["step"],
            theirs["tokens"],
            theirs["lr"],
        )
        assert ours["loss"] == pytest.approx(
            theirs["loss"], rel=2e-5
        )  # the order of sums is the layout's
