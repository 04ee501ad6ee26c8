"""Our Llama beside that of `transformers`: the same weights must give the same logits, so that an export is only a renaming."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from requirement import need
from trainfleet import models
from trainfleet.config.types import Model

SHAPE = Model("test", "llama", 3, 48, 6, 2, 80, 120, 64, 10_000.0, 1e-5, False)
SHAPES = [SHAPE, replace(SHAPE, tie_embeddings=True), replace(SHAPE, kv_heads=6, rope_theta=500_000.0, norm_epsilon=1e-6)]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_equal_llama_for_causal_lm(shape: Model) -> None:
    transformers = need("transformers")
    ours = models.build(shape)
    ours.initialize(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocabulary_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.max_sequence_length,
            rms_norm_eps=shape.norm_epsilon,
            rope_theta=shape.rope_theta,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            tie_word_embeddings=shape.tie_embeddings,
        )
    )
    renamed = {name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in ours.state_dict().items()}
    assert theirs.load_state_dict(renamed, strict=True)
    tokens = torch.randint(0, shape.vocabulary_size, (2, 40), generator=torch.Generator().manual_seed(1))
    mine, other = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    mine.square().sum().backward()
    other.square().sum().backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        other_name = name if name.startswith("lm_head") else f"model.{name}"
        torch.testing.assert_close(parameter.grad, gradients[other_name].grad, rtol=1e-4, atol=1e-6)
