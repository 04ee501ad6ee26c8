"""Generates text from a prompt and streams it to stdout: `python -m trainfleet.engine.generate
RUN_FOLDER [PROMPT]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from .. import devices, models
from ..checkpoints.init_from import require_fit
from ..config import load_resolved
from ..data.dataset import Dataset
from ..data.tokenizer import StreamDecoder, Tokenizer
from ..data.tokenizer import load as load_tokenizer
from ..models import GPT2, Llama
from ..models.llama import Cache
from ..models.network import Network
from ..run import run_folder
from ..run.run_folder import Run
from ..trust.errors import RunError, telling
from ..trust.safe_output import run_program
from .checkpoint import load_model, newest

TEMPERATURE = 0.7
TOP_K = 50
SAMPLE_PROMPT = 40  # length in tokens
# Token offset into the validation text, which skips the license or title at the start.
SAMPLE_BEGINS = 1000
SAMPLE_LENGTH = 120  # maximum length in tokens


@torch.inference_mode()
def continuation(
    model: Llama | GPT2,
    prompt: list[int],
    *,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
    stop_at: int,
    top_p: float = 1.0,
) -> Iterator[int]:
    """Yields generated tokens until the model ends the document or the context is full.

    A prompt that fills the context is truncated to its last tokens, half the context length.
    Temperature 0 means greedy decoding.
    """
    limit = model.shape.max_position_embeddings
    prompt = prompt if len(prompt) < limit else prompt[-(limit // 2) :]
    device, cache = next(model.parameters()).device, Cache()
    tokens = torch.tensor([prompt], device=device)
    for _ in range(limit - len(prompt)):
        logits = model(tokens, cache)[0, -1]
        token = choose(logits, temperature, top_k, generator, top_p)
        if token == stop_at:
            return
        yield token
        tokens = torch.tensor([[token]], device=device)


def choose(
    logits: Tensor, temperature: float, top_k: int, generator: torch.Generator, top_p: float = 1.0
) -> int:
    """Samples a token id with top-k and top-p sampling.

    Candidates are the `top_k` most likely tokens, reduced to the smallest set with total
    probability `top_p`. Temperature 0 means greedy decoding.

    Raises:
        FloatingPointError: the model's output is not finite.
    """
    if not logits.isfinite().all():
        raise FloatingPointError
    logits = logits.float().cpu()
    if temperature == 0:
        return int(logits.argmax())
    values, ids = logits.topk(min(top_k, len(logits)))
    shares = (values / temperature).softmax(-1)  # sorted in descending order
    shares = shares.where(shares.cumsum(-1) - shares < top_p, 0.0)
    return int(ids[torch.multinomial(shares, 1, generator=generator)])


def makes_no_numbers(run: Run) -> RunError:
    """Returns the error for a model that produces non-finite output."""
    why = "its weights are not finite, or too large"
    return RunError(
        "the output of the newest checkpoint's model is not finite",
        where=str(run.folder),
        why=why,
        next="run make verify",
    )


def write_sample(model: Network, dataset: Dataset, seed: int) -> dict[str, str]:
    """Continues a piece of validation text, and returns the `prompt` and the continuation as
    `text`.

    Without validation text, the prompt is the end-of-document token, so the sample starts a new
    document.
    """
    assert isinstance(model, Llama | GPT2)
    tokenizer = load_tokenizer(dataset.folder)
    end = dataset.manifest.end_of_document
    ids = unseen_text(dataset) or [end]
    generator = torch.Generator().manual_seed(seed)
    made = continuation(
        model, ids, temperature=TEMPERATURE, top_k=TOP_K, generator=generator, stop_at=end
    )
    return {
        "prompt": tokenizer.decode(ids),
        "text": tokenizer.decode(
            [token for token, _ in zip(made, range(SAMPLE_LENGTH), strict=False)]
        ),
    }


def unseen_text(dataset: Dataset) -> list[int]:
    """Returns SAMPLE_PROMPT tokens of validation text, or fewer if the text is short or missing."""
    length = min(dataset.manifest.validation_tokens - 1, SAMPLE_BEGINS + SAMPLE_PROMPT)
    if length < 1:
        return []
    tokens = [int(token) for token in dataset.batch("validation", 0, 1, length, 0)[0]]
    return [token for token in tokens if token != dataset.manifest.end_of_document][-SAMPLE_PROMPT:]


@telling
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("trainfleet.engine.generate")
    parser.add_argument("run", type=Path)
    parser.add_argument("prompt", nargs="?", default="The ")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    parser.add_argument("--top-k", type=int, default=TOP_K)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="the same seed writes the same text")
    options = parser.parse_args(arguments)
    for text in stream(options):
        print(text, end="", flush=True)
    print()
    return 0


def stream(options: argparse.Namespace) -> Iterator[str]:
    """Yields the prompt, followed by the generated text piece by piece.

    An end-of-document token precedes the prompt, because nearly every training document follows
    another one. Trailing spaces are stripped, because the space is usually part of the next word's
    token.
    """
    run = Run(options.run)
    model, dataset = load(run)
    if not isinstance(model, Llama | GPT2):
        family = model.shape.family
        raise RunError(
            f"{family} predicts masked tokens and can't generate text",
            where=str(run.folder),
            next="use make eval or make export",
        )
    tokenizer = load_tokenizer(dataset.folder)
    generator = torch.Generator()
    generator.seed() if options.seed is None else generator.manual_seed(options.seed)
    end = dataset.manifest.end_of_document
    prompt = options.prompt.rstrip(" ")
    ids = encode(tokenizer, prompt)
    made = continuation(
        model,
        [end, *ids],
        temperature=options.temperature,
        top_k=options.top_k,
        generator=generator,
        stop_at=end,
        top_p=options.top_p,
    )
    decoder = StreamDecoder(tokenizer)
    for id_ in ids:
        decoder.push(id_)
    yield prompt
    try:
        yield from map(decoder.push, islice(made, options.tokens))
    except FloatingPointError:
        raise makes_no_numbers(run) from None


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids, _ = tokenizer.encode([text])
    return [int(id_) for id_ in ids]


def load(run: Run, device: torch.device | None = None) -> tuple[Network, Dataset]:
    """Loads a run's newest checkpoint onto `device`, and returns the model with its dataset.

    Defaults to the fastest device on this machine.

    Raises:
        RunError: the run has no checkpoint yet.
    """
    config = load_resolved(run.config)
    found = newest(run, config)
    if found is None:
        raise RunError("has no checkpoint yet", where=str(run.folder), next="make train")
    store, step = found
    require_fit(commit := store.read(step), config, store.address(step))
    model = models.build(config.model)
    load_model(store, commit, model)
    dataset = Dataset.open(run_folder.DATA / config.data.name, config.data)
    dataset.check_vocabulary(config.model.vocab_size)
    return model.to(device or devices.nearest().torch_device).eval(), dataset


if __name__ == "__main__":
    run_program(main)
