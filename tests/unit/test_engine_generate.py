"""Writing text: which tokens come, and where it ends."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import torch

from trainfleet import models
from trainfleet.config.types import Model
from trainfleet.data.tokenizer import Tokenizer
from trainfleet.engine import __main__ as engine
from trainfleet.engine import generate
from trainfleet.engine.generate import choose, continuation
from trainfleet.models.llama import Llama
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import DataError
from trainfleet.trust.safe_output import guarded

SHAPE = Model("test", "llama", 2, 32, 4, 2, 48, 64, 24, 10_000.0, 1e-5, False)


def make(seed: int = 1) -> Llama:
    model = models.build(SHAPE)
    model.initialize(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(
                1 if parameter.ndim == 1 else 20
            )  # far from uniform, so that a wrong token is a clear mistake
    return model


def write(
    prompt: list[int], temperature: float = 0.0, seed: int = 0, stop_at: tuple[int, ...] = ()
) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return list(
        continuation(
            make(), prompt, temperature=temperature, top_k=8, generator=generator, stop_at=stop_at
        )
    )


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
    assert len(whole) == SHAPE.max_position_embeddings - 3
    end = whole[5]
    assert write([3, 1, 4], stop_at=(end,)) == whole[: whole.index(end)]


def test_a_prompt_longer_than_the_context_leaves_room_to_write() -> None:
    assert (
        write(list(range(60))) == write(list(range(48, 60))) and len(write(list(range(60)))) == 12
    )


def test_the_seed_decides() -> None:
    assert write([5], 1.0, seed=1) == write([5], 1.0, seed=1) != write([5], 1.0, seed=2)


def test_only_the_likeliest_are_drawn() -> None:
    logits, generator = torch.arange(10.0), torch.Generator().manual_seed(0)
    drawn = {choose(logits, 5.0, 3, generator) for _ in range(200)}
    assert drawn == {7, 8, 9} and choose(logits, 0, 3, generator) == 9
    assert {choose(logits, 1e-3, 10, generator) for _ in islice(range(50), 50)} == {9}


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_corpus_without_validation_text_has_a_sample_all_the_same(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's last act must not fail it: there is no text, or nothing but the ends of documents."""
    end = 3

    class Silent:
        folder, end_of_document = Path(), end
        settings = SimpleNamespace(conversations=False)
        manifest = SimpleNamespace(validation_tokens=tokens, end_of_document=end, settings=settings)

        def batch(self, split: str, first: int, count: int, length: int, seed: int) -> torch.Tensor:
            assert length > 0
            return torch.full((1, length + 1), end)

    monkeypatch.setattr(
        generate,
        "load_tokenizer",
        lambda _: SimpleNamespace(decode=lambda ids: " ".join(map(str, ids))),
    )
    silent: Any = Silent()
    sample = generate.write_sample(make(), silent, seed=0)
    assert sample["prompt"] == str(end) and sample["text"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level BPE with the tokens of LETTERS, "def", " name", " names", "hello" and what these are made of; 0 ends a text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(VOCABULARY, MERGES))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(made.to_str(), "made here")


MERGES = [("d", "e"), ("de", "f"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("n", "a"), ("Ġ", "na"), ("m", "e"),
          ("Ġna", "me"), ("Ġname", "s")]  # fmt: skip
LETTERS = ["Ġ", "Ċ", "Ã", "©", "<", *"abcdefhlmnopsxyz"]
VOCABULARY = {
    token: id
    for id, token in enumerate(
        ["<|endoftext|>", *LETTERS, *(first + second for first, second in MERGES)]
    )
}


def test_the_prompt_of_the_readme_gives_a_name_and_no_second_blank(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model here likes " name" best, which is one token: after a token of a blank alone it would write two blanks."""
    scores = {VOCABULARY["Ġname"]: 5.0, VOCABULARY["Ġnames"]: 4.0}
    logits = torch.tensor([scores.get(id, -5.0) for id in range(len(VOCABULARY))])

    class Liking(Llama):
        def forward(self, tokens: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
            seen.append(tokens[0].tolist())
            return logits.expand(1, tokens.shape[1], -1)

    seen: list[list[int]] = []
    shape = replace(SHAPE, vocab_size=len(VOCABULARY))
    manifest = SimpleNamespace(settings=SimpleNamespace(conversations=False))
    data: Any = SimpleNamespace(folder=Path(), end_of_document=0, manifest=manifest)
    monkeypatch.setattr(generate, "load", lambda run: (Liking(shape), data))
    monkeypatch.setattr(generate, "load_tokenizer", lambda folder: tokenizer)
    words = {"tokens": 2, "temperature": 0.0, "top_k": 5, "top_p": 1.0, "seed": 1}
    options = argparse.Namespace(run=Path(), prompt="def ", **words)
    assert "".join(generate.stream(options)) == "def name name"
    assert seen[0] == [0, VOCABULARY["def"]], "the prompt begins a document"


def test_a_run_says_that_it_concludes_before_it_writes_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog gives a step ten seconds; on a busy machine, or of a large model, a sample takes longer."""
    said: list[object] = []
    monkeypatch.setattr(engine, "write_sample", lambda *_: said.append("sample"))
    checkpoint, model = SimpleNamespace(is_off=False), SimpleNamespace(family="llama")
    trainer = SimpleNamespace(
        progress=SimpleNamespace(step=40),
        watch=SimpleNamespace(heart=SimpleNamespace(at=lambda *place: said.append(place))),
        config=SimpleNamespace(checkpoint=checkpoint, model=model),
        device=SimpleNamespace(executes=True),
    )
    recorder = SimpleNamespace(close=lambda status: None, update=lambda **_: None)
    engine.conclude(Run(tmp_path), trainer, recorder, None, "finished")  # type: ignore[arg-type]
    assert said == [("conclude", 40), "sample"]


def test_a_chat_with_a_model_of_plain_text_points_to_make_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manifest = SimpleNamespace(settings=SimpleNamespace(conversations=False))
    dataset = SimpleNamespace(manifest=manifest, folder=tmp_path)
    monkeypatch.setattr(generate, "Writer", lambda _: SimpleNamespace(dataset=dataset))
    with pytest.raises(DataError, match="was not trained on conversations") as caught:
        list(generate.talk(argparse.Namespace(run=tmp_path)))
    assert caught.value.next == "make sample"


def test_ctrl_c_ends_a_sample_as_it_ends_other_verbs_and_is_how_a_chat_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def interrupted(_: object) -> Iterator[str]:
        yield "half a"
        seen.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    for name in ("stream", "talk"):
        monkeypatch.setattr(generate, name, interrupted)
    with guarded():
        assert (generate.main(["x"]), generate.main(["x", "--chat"])) == (130, 0)
    assert seen == ["half a", "\nhalf a"], "each piece is shown at once"
