"""Tokenizers: exact, the same every time, and a fast library that is wrong is never used."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer

from trainfleet.config.types import Data
from trainfleet.config.vocabulary import vocabulary_size_of
from trainfleet.data import bpe, encoders, work_units
from trainfleet.data.encoders import Words
from trainfleet.data.sources import plan_units
from trainfleet.data.tokenizer import StreamDecoder, Tokenizer, load
from trainfleet.trust.errors import DataError

DATA = Data(
    "set",
    (str(Path(__file__).parents[2] / "python" / "trainfleet" / "data"),),
    "text",
    "bpe",
    600,
    0.1,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bpe.train(DATA, plan_units(DATA)), "trained")


def test_training_gives_the_same_tokenizer_every_time(tokenizer: Tokenizer) -> None:
    assert Tokenizer(bpe.train(DATA, plan_units(DATA)), "again").sha256 == tokenizer.sha256
    assert tokenizer.vocabulary_size == 600 == vocabulary_size_of(DATA)
    assert tokenizer.end_of_document == 0


def test_the_sample_is_bounded_and_spread() -> None:
    data = replace(DATA, sources=("stdlib",))
    plan = plan_units(data)
    limit = plan.bytes // 8
    texts = list(bpe.sample(data, plan, limit))
    assert 0.8 * limit < sum(map(len, texts)) < 1.3 * limit
    assert any("def abspath" in text for text in bpe.sample(data, plan, plan.bytes))


def test_too_little_text_for_the_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aaaa bbbb")
    data = replace(DATA, sources=(str(tmp_path),))
    with pytest.raises(DataError, match="yields a vocabulary of only") as told:
        bpe.train(data, plan_units(data))
    assert "at most" not in told.value.next  # as no config may ask for so few


def test_the_fast_encoder_agrees_with_the_reference(tokenizer: Tokenizer) -> None:
    pytest.importorskip("fastokens")
    encoder, passed = encoders.open_encoder(tokenizer.definition, tokenizer.reference)
    assert encoder.name == "fastokens" and not passed
    texts = [
        *encoders.hard_texts(tokenizer.reference),
        *(path.read_text() for path in Path(__file__).parent.glob("*.py")),
    ]
    assert encoders.first_difference(encoder, tokenizer.reference, texts) is None


def test_encoding_is_flat_and_decodes_to_the_text(tokenizer: Tokenizer) -> None:
    texts = ["def f():\n    return '日本 😀'\n", "", "<|endoftext|>"]
    ids, offsets = tokenizer.encode(texts)
    assert ids.dtype == np.uint32 and offsets.tolist()[0] == 0 and len(offsets) == 4
    assert [tokenizer.decode(ids[a:b]) for a, b in pairwise(offsets)] == texts
    assert tokenizer.end_of_document not in ids, "a document can't contain its own end"


def test_a_wrong_encoder_is_passed_over_and_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(encoders.Fastokens):
        def encode(self, texts: list[str]) -> tuple[encoders.Ids, encoders.Offsets]:
            ids, offsets = super().encode(texts)
            return np.where(ids == ids.max(), 0, ids).astype(np.uint32), offsets

    monkeypatch.setitem(encoders.ENCODERS, "fastokens", Wrong)
    encoder, passed = encoders.open_encoder(
        tokenizer.definition, tokenizer.reference, ("fastokens", "tokenizers")
    )
    assert encoder.name == "tokenizers"
    assert "fastokens" in passed[0] and "differently" in passed[0]


def test_streaming_holds_back_half_a_character(tokenizer: Tokenizer) -> None:
    text = "x = '😀日'\n"
    ids, _ = tokenizer.encode([text])
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(id) for id in ids]
    assert "".join(pieces) == text
    assert "" in pieces and "�" not in "".join(pieces)


@pytest.mark.parametrize("lower", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_wordpiece_by_words_has_the_ids_of_whole_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lower: bool
) -> None:
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    trained = BertWordPieceTokenizer(lowercase=lower)
    trained.train_from_iterator(sources, vocab_size=2000, show_progress=False)
    trained.save_model(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    tokenizer = load(tmp_path)
    assert tokenizer.encoder.name == Words.name and tokenizer.backend.startswith(
        "tokenizers by words 0."
    )
    points = [
        chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000 and (i < 0x3100 or i % 31 == 0)
    ]
    runs = [
        "".join(f"a{point}b {point}'{point}{point}\n" for point in points[i : i + 500])
        for i in range(0, len(points), 500)
    ]
    texts = [
        *encoders.hard_texts(tokenizer.reference),
        *runs,
        *sources,
        "x" * 101 + " " + "y" * 100,
    ]
    assert encoders.first_difference(tokenizer.encoder, tokenizer.reference, texts) is None
    monkeypatch.setattr(encoders, "KEPT", 100)
    for text in sources:  # and when words are forgotten and learnt again
        assert encoders.first_difference(tokenizer.encoder, tokenizer.reference, [text]) is None


def test_only_a_wordpiece_is_encoded_by_words(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="not BERT's WordPiece"):
        Words(tokenizer.definition, tokenizer.reference)


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {}}}']
)
def test_a_broken_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match="tokenizer"):
        vocabulary_size_of(replace(DATA, tokenizer=str(tmp_path)))
    with pytest.raises(DataError, match="can't be read"):
        load(tmp_path / "none.json")


def test_a_tokenizer_without_an_end_token_is_refused(tokenizer: Tokenizer) -> None:
    content = json.loads(tokenizer.definition.replace("<|endoftext|>", "<|strange|>"))
    with pytest.raises(DataError, match="no end-of-document"):
        Tokenizer(json.dumps(content), "strange").end_of_document  # noqa: B018


def test_a_long_text_in_parts_has_the_ids_of_the_whole(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_units, "PART", 2000)
    text = (
        "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))
        + "日本語の文章。" * 900
        + " the end"
    )
    found = list(work_units.parts(text, tokenizer.encoder))
    assert "".join(found) == text and 5 < len(found) < len(text) // 2000
    ids, _ = tokenizer.encode(found)
    assert np.array_equal(ids, tokenizer.encode([text])[0])


def test_a_tokenizer_that_can_not_be_cut_gets_the_text_whole(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Prefixed(encoders.HuggingFace):
        """As SentencePiece does it: every text begins with a space."""

        def encode(self, texts: list[str]) -> tuple[encoders.Ids, encoders.Offsets]:
            return super().encode([f" {text}" for text in texts])

    monkeypatch.setattr(work_units, "PART", 2000)
    text = Path(__file__).read_text() * 3
    assert list(work_units.parts(text, Prefixed(tokenizer.definition))) == [text]
