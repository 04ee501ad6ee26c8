"""Masked batches: the published proportions, pairs that are what their label says, the same for any world size."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainfleet.config import schema
from trainfleet.config.families import FAMILIES
from trainfleet.config.types import Data, Train
from trainfleet.data.dataset import Dataset
from trainfleet.data.masking import IGNORED, Masked, Specials, specials_of
from trainfleet.data.tokenize_worker import Share, tokenize
from trainfleet.data.tokenizer import load
from trainfleet.devices.cpu import Cpu
from trainfleet.engine.batches import Batches
from trainfleet.trust.errors import DataError
from trainfleet.trust.validation import fit

DOCUMENTS = 300
CHOSEN = {
    "global_batch_size": 24, "micro_batch_size": 1, "sequence_length": 64, "seed": 1, "learning_rate": 0.01, "warmup_steps": 1,
    "schedule_steps": 1, "spike_sigmas": 6.0, "decay_steps": 1, "activation_checkpointing": "none", "compile": False,
    "parallelism": {"fsdp": 1, "tensor": 1, "pipeline": 1, "context": 1, "zero_stage": 3, "virtual_stages": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Documents of sentences `d17 s0 w0 w1 … .`, so that a token tells which document and sentence it is from."""
    root = tmp_path_factory.mktemp("masking")
    names = [f"d{i}" for i in range(DOCUMENTS)]
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        ".",
        *names,
        *(f"w{i}" for i in range(40)),
    ]
    (root / "vocab.txt").write_text("\n".join(tokens) + "\n")
    with open(root / "text.jsonl", "w") as file:
        for name in names:
            sentences = [
                f"{name} " + " ".join(f"{name} w{(s * 7 + k) % 40}" for k in range(6)) + " ."
                for s in range(12)
            ]
            file.write(json.dumps({"text": " ".join(sentences)}) + "\n")
    data = Data("set", (str(root / "text.jsonl"),), "text", str(root / "vocab.txt"), 0, 0.01)
    assert tokenize(data, Share(0, 1, 1), root / "data")
    return Dataset.open(root / "data" / "set")


@pytest.fixture(scope="module")
def specials(dataset: Dataset) -> Specials:
    return specials_of(load(dataset.folder))


def roberta(dataset: Dataset) -> Masked:
    return Masked(dataset, False, FAMILIES["roberta"].guesses)


def bert(dataset: Dataset) -> Masked:
    return Masked(dataset, True, FAMILIES["bert"].guesses)


def test_masking_has_the_published_proportions(dataset: Dataset, specials: Specials) -> None:
    ids, targets = np.moveaxis(roberta(dataset).batch("train", 0, 400, 128, seed=1), 2, 0)
    plain = dataset.batch("train", 0, 400, 126, seed=1)[:, :126]
    assert (ids[:, 0] == specials.start).all() and (ids[:, -1] == specials.separator).all()
    inside, labels = ids[:, 1:-1], targets[:, 1:-1]
    chosen = labels != IGNORED
    assert np.array_equal(np.where(chosen, labels, inside), plain), (
        "what is not chosen is as it was, and targets are the text"
    )
    assert not np.isin(
        labels[chosen], [specials.start, specials.separator, specials.mask, specials.padding]
    ).any()
    assert (chosen.sum(axis=1) == round(0.15 * 128)).all(), "as many in every row"
    masked, kept = (inside == specials.mask)[chosen].mean(), (inside == plain)[chosen].mean()
    assert abs(masked - 0.8) < 0.01 and abs(kept - 0.1) < 0.01
    assert abs(chosen.mean(axis=0) - 19 / 126).max() < 0.1, "any place may be chosen"


@pytest.mark.parametrize("view", [Dataset, roberta, bert])
def test_global_batches_are_the_same_for_any_world_after_a_resume_and_over_an_epoch(
    dataset: Dataset, view: Any
) -> None:
    samples = dataset if view is Dataset else view(dataset)
    train = fit(Train, schema.fill({"name": "worlds"}, schema.load_schema())["train"] | CHOSEN)
    first = (
        samples.samples("train", train.sequence_length) // train.global_batch_size - 4
    )  # an epoch ends in the middle of these
    steps = range(first, first + 10)

    def hashes(world: int, steps: range) -> list[str]:
        """Of the global batch at each step, as a job of so many ranks sees it that begins with the first of these steps."""
        config: Any = SimpleNamespace(train=train)
        ranks = [Batches(samples, config, rank, world, Cpu()) for rank in range(world)]
        found = []
        for step in steps:
            parts = [batch for rank in ranks for _, batch in rank.of(step)]
            whole = (
                torch.cat([part.inputs for part in parts]),
                torch.cat([part.targets for part in parts]),
            )
            found.append(
                hashlib.sha256(b"".join(part.numpy().tobytes() for part in whole)).hexdigest()
            )
        for rank in ranks:
            rank.reader.shutdown(cancel_futures=True)
        return found

    expected = hashes(1, steps)
    assert len(set(expected)) == len(expected)
    assert hashes(2, steps) == expected
    assert hashes(3, steps[:4]) + hashes(8, steps[4:7]) + hashes(4, steps[7:]) == expected


def test_masks_do_not_depend_on_who_asks_and_change_every_epoch(dataset: Dataset) -> None:
    n = dataset.samples("train", 62)
    for masked, length in ((roberta(dataset), 64), (bert(dataset), 65)):
        whole = masked.batch("train", n - 8, 24, length, seed=1)
        for world in (2, 3, 8):
            part = 24 // world
            ranks = [
                masked.batch("train", n - 8 + rank * part, part, length, seed=1)
                for rank in range(world)
            ]
            assert np.array_equal(np.concatenate(ranks), whole)
    everything = [
        roberta(dataset).batch("train", epoch * n, n, 64, seed=1)[..., 1] for epoch in (0, 1)
    ]
    places = [dataset.positions("train", epoch * n, n, 62, seed=1)[1] for epoch in (0, 1)]
    one, two = (
        targets[np.argsort(place)] for targets, place in zip(everything, places, strict=True)
    )
    same = ((one != IGNORED) & (two != IGNORED)).sum() / (one != IGNORED).sum()
    assert 0.1 < same < 0.2, "the same token is masked again by chance only"


@pytest.mark.parametrize("split", ["train", "validation"])
def test_pairs_are_what_their_label_says(dataset: Dataset, specials: Specials, split: str) -> None:
    rows = bert(dataset).batch(split, 0, 300, 128, seed=1)
    ids, targets, segments = np.moveaxis(rows, 2, 0)
    labels, targets[:, 0] = targets[:, 0].copy(), IGNORED
    plain = np.where(targets != IGNORED, targets, ids)
    text = dataset.batch(split, 0, 300, 125, seed=1)[:, :125]
    assert 0.4 < labels.mean() < 0.6
    ended = apart = 0
    for row, types, label, expected in zip(plain, segments, labels, text, strict=True):
        first, second = row[types == 0], row[types == 1]
        assert (
            first[0] == specials.start
            and first[-1] == second[-1] == specials.separator
            and (np.diff(types) >= 0).all()
        )
        assert len(first) >= 3 and len(second) >= 2
        ended += int(first[-2] in specials.sentence_ends)
        goes_on = np.array_equal(np.concatenate([first[1:-1], second[:-1]]), expected)
        assert goes_on or label == 1
        apart += not goes_on
    assert ended > 200, "parts end with sentences"
    assert apart / labels.sum() > 0.95


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    with pytest.raises(DataError, match="no mask token"):
        specials_of(load(tmp_path))
