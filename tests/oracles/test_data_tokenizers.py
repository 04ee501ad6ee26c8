"""Converted tokenizers against the libraries they come from: the same ids, text for text."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest

from requirement import need
from trainfleet.data import encoders
from trainfleet.data.tokenizer import Tokenizer, load

TEXTS = [
    path.read_text()
    for path in sorted(Path(__file__).parents[2].joinpath("python").rglob("*.py"))[:40]
]
MIXED = [
    "Grüße aus Köln — ça va? ",
    "日本語のテキストと漢字。",
    "Привет, мир! ",
    "emoji 😀👩‍👩‍👧 end",
    "tabs\tand\n\nlines  two   three",
    "1234 5,678.90",
]
HARD = [text for text in (*encoders.HARD_TEXTS, *MIXED) if "\0" not in text]


def sentencepiece_model(folder: Path, **options: object) -> tuple[Path, object]:
    sentencepiece = need("sentencepiece")
    model, lines = (
        io.BytesIO(),
        [line for text in [*TEXTS, *MIXED * 50] for line in text.splitlines() if line.strip()],
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=1200,
        minloglevel=2,
        num_threads=2,
        **options,
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path, sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


LLAMA = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
         "split_digits": True, "allow_whitespace_only_pieces": True}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [LLAMA, {"model_type": "bpe"}, {"model_type": "unigram"}],
    ids=["llama-2", "bpe-nfkc", "unigram"],
)
def test_a_sentencepiece_model_gives_the_ids_of_sentencepiece(
    tmp_path: Path, options: dict[str, object]
) -> None:
    path, original = sentencepiece_model(tmp_path, **options)
    tokenizer = load(path)
    assert tokenizer.vocabulary_size == 1200 == len(tokenizer.vocabulary)
    assert tokenizer.end_of_document == original.eos_id()
    texts = [*HARD, *(text[:3000] for text in TEXTS)]
    # `tokenizers` takes a control token's spelling for the token in a Unigram model, as it does in T5's own port.
    for text in (
        texts if options["model_type"] == "bpe" else [text for text in texts if "s>" not in text]
    ):
        ids, _ = tokenizer.reference.encode([text])
        assert ids.tolist() == original.encode(text), text[:60]
        if options is LLAMA:
            assert tokenizer.decode(ids) == text


def test_a_wordpiece_vocabulary_gives_the_ids_of_bert(tmp_path: Path) -> None:
    transformers = need("transformers")
    words = sorted({word.lower() for text in TEXTS for word in text.split() if word.isalpha()})[
        :2000
    ]
    letters = [chr(i) for i in range(33, 127) if not chr(i).isupper()]
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters),
        *words,
    ]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(dict.fromkeys(tokens)) + "\n")
    original = transformers.BertTokenizer(str(path))
    tokenizer = load(path)
    for text in [*HARD, *(text[:3000] for text in TEXTS)]:
        ids, _ = tokenizer.encode([text])
        assert ids.tolist() == original.encode(text, add_special_tokens=False), text[:60]


def test_merges_give_the_ids_of_the_same_tokenizer_json(tmp_path: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    original = ByteLevelBPETokenizer()
    original.train_from_iterator(
        TEXTS, vocab_size=1500, special_tokens=["<|endoftext|>"], show_progress=False
    )
    original.save_model(str(tmp_path))
    tokenizer = load(tmp_path)
    for text in (*HARD, *(text.replace("<|endoftext|>", "") for text in TEXTS)):
        assert tokenizer.encode([text])[0].tolist() == original.encode(text).ids, text[:60]


@pytest.mark.parametrize("name", ["fastokens", "gigatoken"])
@pytest.mark.thorough
def test_fast_encoders_on_every_code_point(name: str) -> None:
    """Where they are exact they are used, and where not (a newer Unicode table, say) the check at opening has to see it."""
    pytest.importorskip(name)
    from trainfleet.config.types import Data
    from trainfleet.data import bpe
    from trainfleet.data.sources import plan_units

    data = Data(
        "set",
        (str(Path(__file__).parents[2] / "python" / "trainfleet" / "data"),),
        "text",
        "bpe",
        1000,
        0.1,
    )
    tokenizer = Tokenizer(bpe.train(data, plan_units(data)), "trained")
    encoder = encoders.ENCODERS[name](tokenizer.definition)
    points = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    random.Random(0).shuffle(points)
    texts = ["".join(points[i : i + 1000]) for i in range(0, len(points), 1000)]
    texts += [f"a{point}b {point}'s{point}{point} 1{point}\n{point}" for point in points[::50]]
    difference = encoders.first_difference(encoder, tokenizer.reference, texts)
    chosen, _ = encoders.open_encoder(tokenizer.definition, tokenizer.reference, (name,))
    assert (chosen is tokenizer.reference) == (difference is not None), difference


def test_the_conversion_is_the_same_every_time(tmp_path: Path) -> None:
    path, _ = sentencepiece_model(tmp_path, **LLAMA)
    assert load(path).sha256 == load(path).sha256
    json.loads(load(path).definition)
