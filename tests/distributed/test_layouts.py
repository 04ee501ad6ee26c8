"""Every layout computes what one process computes: losses and gradient norms at each of 20 steps, on real ranks over gloo, in fp32.

Epsilon is large here, so that what is compared is the layout. Adam divides by the root of a mean of squares plus epsilon: where a
gradient is next to nothing its sign decides, and so does the order in which it was added up. With epsilon 1e-8 the losses are as
near (4e-7), and the norms drift apart to 4e-4 within the 20 steps; with 1e-3 they stay within 2e-6 (tests/bench/LOG.md). So it is with
the epsilon of OLMo 2's norms: with 1e-5 one step of the twenty shows the order of sums, on one process too.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import ranks
from ranks import Bench

import chats

pytestmark = pytest.mark.timeout(900)  # of the first of a kind, which waits for all its runs

LAYOUTS = {
    "alone": (1, {}),
    "one-pass": (1, {"train.micro_batch_size": 8}),
    "ddp2": (2, {}),
    "ddp4": (4, {}),
    "fsdp2": (2, {"fsdp": 2}),
    "zero1": (2, {"fsdp": 2, "zero_stage": 1}),
    "hsdp": (4, {"fsdp": 2, "train.micro_batch_size": 1}),  # two micro-batches per rank
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "pp3": (3, {"pipeline": 3}),  # 4 micro-batches through stages of one and two blocks
    "interleaved": (2, {"pipeline": 2, "virtual_stages": 2}),
    "cp2": (2, {"context": 2}),
    "fsdp2-tp2": (4, {"fsdp": 2, "tensor": 2}),
    "pp2-tp2": (4, {"pipeline": 2, "tensor": 2}),
    "hsdp-tp2": (8, {"fsdp": 2, "tensor": 2}),
}
FEWER = ("alone", "fsdp2", "tp2", "fsdp2-tp2")
ENCODER = {
    "model.kv_heads": 4,
    "model.tie_word_embeddings": "true",
    "model.dropout": 0.0,
    "model.norm_eps": 1e-5,
}
KINDS = {  # what is trained, and the layouts in which it is
    "llama": ({}, tuple(LAYOUTS)),
    "bert": ({"model.family": "bert", **ENCODER}, tuple(LAYOUTS)),
    "roberta": ({"model.family": "roberta", **ENCODER}, ("alone", "tp2", "pp2", "cp2")),
    "gpt2": ({"model.family": "gpt2", **ENCODER}, ("alone", "tp2", "pp2", "cp2")),
    "qwen2": (
        {"model.family": "qwen2"},
        ("alone", "tp2", "fsdp2-tp2", "pp2"),
    ),  # biases of query, key and value
    "qwen3": (
        {"model.family": "qwen3", "model.head_dim": 24, "model.norm_eps": 1e-3},
        ("alone", "fsdp2", "tp2", "fsdp2-tp2", "pp2", "cp2"),
    ),  # norms by head
    "olmo2": (
        {"model.family": "olmo2", "model.tie_word_embeddings": "false", "model.norm_eps": 1e-3},
        ("alone", "fsdp2", "pp2", "cp2"),
    ),
    "gemma": (
        {"model.family": "gemma", "model.tie_word_embeddings": "true"},
        ("alone", "fsdp2", "tp2", "pp2"),
    ),
    "lamb": ({"train.optimizer": "lamb"}, FEWER),
    "muon": ({"train.optimizer": "muon"}, FEWER),
    "documents": ({"train.document_mask": "true"}, ("alone", "ddp2", "tp2", "pp2", "cp2")),
    "conversations": (
        {"train.sequence_length": 128},
        ("alone", "one-pass", "ddp2", "ddp4", "fsdp2", "tp2", "pp2", "interleaved", "cp2"),
    ),
}
# The norms of query and key divide by what is small at first, so that the order of a sum shows more: FSDP alone is 4e-5 apart.


@pytest.fixture(scope="module", params=KINDS)
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Path]]:
    """Every layout's run, with four blocks (enough for four stages) and two micro-batches or more accumulated."""
    here, folder = Path.cwd(), tmp_path_factory.mktemp(request.param)
    (folder / "short").mkdir()
    for number, text in enumerate(ranks.TEXT[0].read_text().split("\n\n")):
        (folder / "short" / f"{number}.py").write_text(text)
    config = ranks.CONFIG
    if request.param == "documents":
        config = config.replace("[text]", "[short]")
    if request.param == "conversations":
        chats.folder(folder / "model")
        chats.write(folder / "a.jsonl", [chats.record(n) for n in range(200)])
        config = config.replace("[text]", "[a.jsonl]").replace("vocab_size: 384", chats.KEYS)
    bench = Bench(folder, config)
    made = {}
    values, names = KINDS[request.param]
    for name in names:
        size, degrees = LAYOUTS[name]
        layout = {
            key if "." in key else f"train.parallelism.{key}": value
            for key, value in degrees.items()
        }
        common = {"train.micro_batch_size": 2, "model.layers": 4, "train.epsilon": 1e-3}
        made[name] = bench.prepare(name, size, **common | values | layout)
    bench.train_all([(run, LAYOUTS[name][0]) for name, run in made.items()])
    yield made
    os.chdir(here)


def test_every_layout_trains_as_one_process_does(runs: dict[str, Path]) -> None:
    alone = ranks.metrics(runs["alone"])
    assert len(alone) == 20
    apart = {
        name: found
        for name, run in runs.items()
        if (found := farthest(ranks.metrics(run), alone)) > 1e-5
    }
    assert apart == {}


def farthest(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """The largest relative difference of any number of any step; the steps and what is logged must be the same.

    Of the norms the median: where a text repeats one token, gradients cancel, and such a step's norm
    tells a rounding by 1e4 and more (LOG.md). A layout that loses a part of a gradient is wrong in each.
    """
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    apart = defaultdict[str, list[float]](list)
    for mine, other in zip(ours, theirs, strict=True):
        for key in mine:
            apart[key].append(abs(mine[key] / other[key] - 1))
    return max(median(apart.pop("grad_norm")), *map(max, apart.values()))


def test_every_layout_says_what_the_model_writes(
    runs: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    writes = request.node.callspec.params["runs"] not in (
        "bert",
        "roberta",
    )  # a model that guesses hidden tokens does not
    samples = [ranks.results(run).get("sample") for run in runs.values()]
    assert all(bool(sample and sample["text"]) == writes for sample in samples)
