"""RoBERTa and BERT learn: on the default corpus, in minutes on two ranks, they guess hidden tokens far better than the unigram.

Always guessing the commonest token is right `baseline` of the time; to do better, a model must have learnt to look around.
"""

from __future__ import annotations

import pytest
from ranks import Bench

from trainfleet.engine import evaluate
from trainfleet.run import run_folder

CONFIG = """
name: masked
fleet: {nodes: 2}
data: {name: stdlib, sources: [stdlib], vocab_size: 1024}
model: {layers: 3, hidden_size: 128, heads: 4, kv_heads: 4, intermediate_size: 512, tie_word_embeddings: true, dropout: 0.0, norm_eps: 1.0e-5}
train: {steps: 400, precision: fp32, global_batch_size: 32, sequence_length: 128, micro_batch_size: 16, optimizer: muon, learning_rate: 2.0e-3, validate_every: 0}
checkpoint: {every: 100000}
"""
BENCH = {"config": CONFIG, "patience": 1500}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("family", ["roberta", "bert"])
def test_it_guesses_hidden_tokens_at_twice_the_baseline(bench: Bench, family: str) -> None:
    scores = evaluate.evaluate(run_folder.Run(bench.train(family, 2, model__family=family)))
    assert scores.accuracy > 2 * scores.baseline, scores
