"""BERT as a run: the same losses at any world size, and its exported folder begins another run. That it learns is a drill."""

from __future__ import annotations

import pytest
import ranks
from ranks import Bench

from requirement import need
from trainfleet.engine import evaluate, export
from trainfleet.run import run_folder

BERT = {
    "model__family": "bert", "model__norm_eps": 1e-5, "model__kv_heads": 4, "model__tie_word_embeddings": "true",
    "model__dropout": 0.0, "train__steps": 8, "train__validate_every": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(bench: Bench) -> run_folder.Run:
    return run_folder.Run(bench.train("one", 1, **BERT))


def test_bert_has_the_same_losses_at_any_world_size(bench: Bench, run: run_folder.Run) -> None:
    two = bench.train("two", 2, **BERT)
    for ours, theirs in zip(ranks.metrics(run.folder), ranks.metrics(two), strict=True):
        assert ours.pop("grad_norm") == pytest.approx(theirs.pop("grad_norm"), rel=1e-3)
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_its_folder_begins_another_run(bench: Bench, run: run_folder.Run) -> None:
    export.export(run, out := bench.folder / "out")
    tokenizer = need("transformers").AutoTokenizer.from_pretrained(out)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("import <|mask|>\n")["input_ids"])
    assert tokens[0] == tokens[-1] == "<|endoftext|>" and "<|mask|>" in tokens
    begun = {
        "train__init_from": str(out),
        "train__learning_rate": 1e-9,
        "train__steps": 1,
        "train__validate_every": 0,
    }
    again = run_folder.Run(bench.train("again", 2, **BERT | begun))
    scores, same = evaluate.evaluate(run), evaluate.evaluate(again)
    assert same.loss == pytest.approx(scores.loss, rel=1e-5) and same.pair_accuracy is not None
    assert 0 < scores.baseline < 0.2 and scores.sequences > 10
    export.export(again, second := bench.folder / "second")
    assert {path.name for path in second.iterdir()} == {path.name for path in out.iterdir()}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (second / name).read_bytes()
