"""Every encoder against `tokenizers`, text for text: `python tests/oracles/exactness.py CORPUS [MEGABYTES]`, by hand, as it takes minutes.

Four kinds of tokenizer are trained on the corpus of tests/bench/corpus.py: Llama 3's and GPT-2's kind of byte-level BPE, a SentencePiece
BPE as Llama 2's, and a WordPiece as BERT's.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))

from trainfleet.config.types import Data
from trainfleet.data import bpe, encoders
from trainfleet.data.documents import in_batches, read_unit
from trainfleet.data.sources import UnitPlan, plan_units
from trainfleet.data.tokenizer import Tokenizer, load


def adversarial() -> list[str]:
    """Every code point there is, alone among letters and in runs, and the texts that are checked at every opening."""
    points = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    runs = ["".join(points[i : i + 997]) for i in range(0, len(points), 997)]
    return [
        *encoders.HARD_TEXTS,
        *runs,
        *(f"a{point}b {point}'s{point}{point} 1{point}\n{point}" for point in points[::7]),
    ]


def trained(data: Data, plan: UnitPlan, folder: Path) -> Iterator[tuple[str, Tokenizer]]:
    import sentencepiece
    from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer

    sample = list(bpe.sample(data, plan))
    yield "Llama 3's kind of BPE", Tokenizer(bpe.train(data, plan), "trained")
    gpt2 = ByteLevelBPETokenizer()
    gpt2.train_from_iterator(
        sample, vocab_size=32_000, special_tokens=["<|endoftext|>"], show_progress=False
    )
    gpt2.save_model(str(folder))
    yield "GPT-2's kind of BPE", load(folder)
    model, lines = io.BytesIO(), (line for text in sample for line in text.splitlines() if line)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, vocab_size=16_000, model_type="bpe", byte_fallback=True, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True, input_sentence_size=100_000,
    )  # fmt: skip
    (folder / "llama.model").write_bytes(model.getvalue())
    yield "SentencePiece BPE", load(folder / "llama.model")
    bert = BertWordPieceTokenizer()
    bert.train_from_iterator(sample, vocab_size=30_000, show_progress=False)
    bert.save_model(str(folder), "bert")
    yield "WordPiece", load(folder / "bert-vocab.txt")


def main(corpus: str, megabytes: float) -> None:
    data = Data("set", (corpus,), "text", "bpe", 32_000, 0.01)
    plan = plan_units(data)
    with tempfile.TemporaryDirectory() as folder:
        for kind, tokenizer in trained(data, plan, Path(folder)):
            began, size, documents = time.time(), 0, 0
            for batch in in_batches(
                document for unit in plan.units for document in read_unit(unit, "text")
            ):
                texts = [document.text for document in batch]
                difference = encoders.first_difference(
                    tokenizer.encoder, tokenizer.reference, texts
                )
                assert difference is None, f"{kind}: {difference!r}"
                size, documents = (
                    size + sum(document.size for document in batch),
                    documents + len(batch),
                )
                if size >= megabytes * 1e6:
                    break
            difference = encoders.first_difference(
                tokenizer.encoder, tokenizer.reference, hard := adversarial()
            )
            result = "no difference" if difference is None else f"different on {difference!r}"
            print(
                f"{kind}: {tokenizer.backend} = tokenizers on {documents:,} documents, {size / 1e6:.0f} MB; on {len(hard):,} hard texts: "
                f"{result} ({time.time() - began:.0f} s){''.join(f'; {note}' for note in tokenizer.notes)}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if sys.argv[2:] else 50)
