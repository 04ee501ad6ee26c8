"""Masked batches: the published proportions, pairs that are what their label says, the same for any world size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainfleet.config.types import Data
from trainfleet.data import packing
from trainfleet.data.dataset import Dataset
from trainfleet.data.job import Share, tokenize
from trainfleet.data.masking import IGNORED, Specials, packed_batch, pair_batch, specials_of
from trainfleet.data.tokenizer import load
from trainfleet.errors import DataError

DOCUMENTS = 300


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Documents of sentences `d17 s0 w0 w1 … .`, so that a token tells which document and sentence it is from."""
    root = tmp_path_factory.mktemp("masking")
    names = [f"d{i}" for i in range(DOCUMENTS)]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *names, *(f"w{i}" for i in range(40))]
    (root / "vocab.txt").write_text("\n".join(tokens) + "\n")
    with open(root / "text.jsonl", "w") as file:
        for name in names:
            sentences = [f"{name} " + " ".join(f"{name} w{(s * 7 + k) % 40}" for k in range(6)) + " ." for s in range(12)]
            file.write(json.dumps({"text": " ".join(sentences)}) + "\n")
    data = Data("set", (str(root / "text.jsonl"),), "text", str(root / "vocab.txt"), 0, 0.01)
    assert tokenize(data, Share(0, 1, 1), root / "data")
    return Dataset.open(root / "data" / "set")


@pytest.fixture(scope="module")
def specials(dataset: Dataset) -> Specials:
    return specials_of(load(dataset.folder))


def test_masking_has_the_published_proportions(dataset: Dataset, specials: Specials) -> None:
    batch = packed_batch(dataset, specials, 0, 400, 128, seed=1)
    plain = dataset.batch("train", 0, 400, 126, seed=1)[:, :126]
    assert (batch.input_ids[:, 0] == specials.start).all() and (batch.input_ids[:, -1] == specials.separator).all()
    inside, labels = batch.input_ids[:, 1:-1], batch.labels[:, 1:-1]
    chosen = labels != IGNORED
    assert np.array_equal(np.where(chosen, labels, inside), plain), "what is not chosen is as it was, and labels are the text"
    assert not np.isin(labels[chosen], [specials.start, specials.separator, specials.mask, specials.padding]).any()
    free = plain != dataset.manifest.end_of_document
    assert abs(chosen.sum() / free.sum() - 0.15) < 0.005
    masked, kept = (inside == specials.mask)[chosen].mean(), (inside == plain)[chosen].mean()
    assert abs(masked - 0.8) < 0.01 and abs(kept - 0.1) < 0.01


def test_masks_do_not_depend_on_who_asks_and_change_every_epoch(dataset: Dataset, specials: Specials) -> None:
    n = dataset.samples("train", 62)
    for make, length in ((packed_batch, 64), (pair_batch, 65)):
        whole = make(dataset, specials, n - 8, 24, length, seed=1)
        for world in (2, 3, 8):
            part = 24 // world
            ranks = [make(dataset, specials, n - 8 + rank * part, part, length, seed=1) for rank in range(world)]
            for name in ("input_ids", "labels", "token_type_ids", "attention_mask"):
                assert np.array_equal(np.concatenate([getattr(rank, name) for rank in ranks]), getattr(whole, name)), name
    everything = [packed_batch(dataset, specials, epoch * n, n, 64, seed=1) for epoch in (0, 1)]
    places = [dataset.positions("train", epoch * n, n, 62, seed=1)[1] for epoch in (0, 1)]
    one, two = (batch.labels[np.argsort(place)] for batch, place in zip(everything, places, strict=True))
    same = ((one != IGNORED) & (two != IGNORED)).sum() / (one != IGNORED).sum()
    assert 0.1 < same < 0.2, "the same token is masked again by chance only"


def test_pairs_are_what_their_label_says(dataset: Dataset, specials: Specials) -> None:
    batch = pair_batch(dataset, specials, 0, 300, 128, seed=1, fraction=0.0)
    tokenizer = load(dataset.folder)
    names = {id: token for token, id in tokenizer.vocabulary.items() if token.startswith("d")}
    assert batch.next_sentence is not None and 0.4 < batch.next_sentence.mean() < 0.6
    ended = apart = 0
    for ids, types, attention, label in zip(
        batch.input_ids, batch.token_type_ids, batch.attention_mask, batch.next_sentence, strict=True
    ):
        used = ids[: attention.sum()]
        assert (ids[attention.sum() :] == specials.padding).all()
        assert used[0] == specials.start and used[-1] == specials.separator and (used == specials.separator).sum() == 2
        first, second = used[types[: len(used)] == 0], used[types[: len(used)] == 1]
        assert first[-1] == specials.separator and len(first) >= 3 and len(second) >= 2
        ended += int(first[-2] in specials.sentence_ends)
        documents = [{names[id] for id in part if id in names} for part in (first, second)]
        if label == 0:
            assert len(documents[0] | documents[1]) <= 1, "one document runs on"
        else:
            apart += documents[0] != documents[1]
    assert ended > 200, "parts end with sentences"
    assert apart / batch.next_sentence.sum() > 0.95


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    with pytest.raises(DataError, match="no mask token"):
        specials_of(load(tmp_path))


def test_documents_in_packed_rows() -> None:
    rows = np.array([[5, 6, 0, 7, 8, 0], [0, 5, 5, 5, 0, 0]])
    assert packing.document_numbers(rows, 0).tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]]
    assert packing.positions(rows, 0).tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 0]]
    assert packing.bounds(rows, 0).tolist() == [0, 3, 6, 7, 11, 12]
