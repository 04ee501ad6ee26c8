"""Writing text: which tokens come, and where it ends."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainfleet import models
from trainfleet.config.types import Model
from trainfleet.engine import generate
from trainfleet.engine.generate import choose, continuation
from trainfleet.models.llama import Llama

SHAPE = Model("test", "llama", 2, 32, 4, 2, 48, 64, 24, 10_000.0, 1e-5, False)


def make() -> Llama:
    model = models.build(SHAPE)
    model.initialize(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 if parameter.ndim == 1 else 20)  # far from uniform, so that a wrong token is a clear mistake
    return model


def write(prompt: list[int], temperature: float = 0.0, seed: int = 0, stop_at: int = -1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return list(continuation(make(), prompt, temperature=temperature, top_k=8, generator=generator, stop_at=stop_at))


def greedy(prompt: list[int], count: int) -> list[int]:
    """The likeliest continuation, with a whole forward for every token."""
    model, ids = make(), list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_without_temperature_it_is_the_likeliest_text() -> None:
    assert write([3, 1, 4])[:15] == greedy([3, 1, 4], 15)


def test_it_ends_with_the_document_and_with_the_context() -> None:
    whole = write([3, 1, 4])
    assert len(whole) == SHAPE.max_sequence_length - 3
    end = whole[5]
    assert write([3, 1, 4], stop_at=end) == whole[: whole.index(end)]


def test_a_prompt_longer_than_the_context_leaves_room_to_write() -> None:
    assert write(list(range(60))) == write(list(range(48, 60))) and len(write(list(range(60)))) == 12


def test_the_seed_decides() -> None:
    assert write([5], 1.0, seed=1) == write([5], 1.0, seed=1) != write([5], 1.0, seed=2)


def test_only_the_likeliest_are_drawn() -> None:
    logits, generator = torch.arange(10.0), torch.Generator().manual_seed(0)
    drawn = {choose(logits, 5.0, 3, generator) for _ in range(200)}
    assert drawn == {7, 8, 9} and choose(logits, 0, 3, generator) == 9
    assert {choose(logits, 1e-3, 10, generator) for _ in islice(range(50), 50)} == {9}


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_corpus_without_validation_text_has_a_sample_all_the_same(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's last act must not fail it: there is no text, or nothing but the ends of documents."""
    end = 3

    class Silent:
        folder, manifest = Path(), SimpleNamespace(validation_tokens=tokens, end_of_document=end)

        def batch(self, split: str, first: int, count: int, length: int, seed: int) -> torch.Tensor:
            assert length > 0
            return torch.full((1, length + 1), end)

    monkeypatch.setattr(generate, "load_tokenizer", lambda _: SimpleNamespace(decode=lambda ids: " ".join(map(str, ids))))
    silent: Any = Silent()
    sample = generate.write_sample(make(), silent, seed=0)
    assert sample["prompt"] == str(end) and sample["text"]
