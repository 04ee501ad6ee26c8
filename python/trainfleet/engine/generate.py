"""Generates text from a prompt and streams it to stdout: `python -m trainfleet.engine.generate
RUN_FOLDER [PROMPT]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from .. import devices, models
from ..checkpoints.init_from import require_fit
from ..config import load_resolved
from ..data.chat import ASSISTANT, USER, ChatEncoder, ChatTemplate, Messages
from ..data.dataset import Dataset
from ..data.shards import unsigned
from ..data.tokenizer import StreamDecoder, Tokenizer
from ..data.tokenizer import load as load_tokenizer
from ..models import GPT2, Llama
from ..models.llama import Cache
from ..models.loss import IGNORED
from ..models.network import Network
from ..run.run_folder import Run
from ..trust.errors import DataError, RunError, telling
from ..trust.safe_output import run_program, show_at_once
from .batches import open_dataset
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
    stop_at: Collection[int],
    top_p: float = 1.0,
) -> Iterator[int]:
    """Yields generated tokens until the model emits one of `stop_at` or the context is full.

    If the prompt fills the context, only its last half is kept. Temperature 0 means greedy
    decoding.
    """
    limit = model.shape.max_position_embeddings
    prompt = prompt if len(prompt) < limit else prompt[-(limit // 2) :]
    device, cache = next(model.parameters()).device, Cache()
    tokens = torch.tensor([prompt], device=device)
    for _ in range(limit - len(prompt)):
        logits = model(tokens, cache)[0, -1]
        token = choose(logits, temperature, top_k, generator, top_p)
        if token in stop_at:
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
    return RunError(
        "the output of the newest checkpoint's model is not finite",
        where=str(run.folder),
        why="its weights are not finite, or too large",
        next="run make verify",
    )


def write_sample(model: Network, dataset: Dataset, seed: int) -> dict[str, str]:
    """Generates a continuation of some validation text, or an answer to a question in it.

    Returns it as `text`, along with the `prompt`. Without validation text, the prompt is the
    end-of-document token, so the sample starts a new document.
    """
    assert isinstance(model, Llama | GPT2)
    tokenizer = load_tokenizer(dataset.folder)
    ids = unseen_text(dataset) or [dataset.manifest.end_of_document]
    generator = torch.Generator().manual_seed(seed)
    made = continuation(
        model,
        ids,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        generator=generator,
        stop_at=stops_of(dataset),
    )
    text = tokenizer.decode(list(islice(made, SAMPLE_LENGTH)))
    return {"prompt": tokenizer.decode(ids), "text": text}


def unseen_text(dataset: Dataset) -> list[int]:
    """Returns SAMPLE_PROMPT tokens of validation text, or fewer if the text is short or missing.

    In a conversation, returns the tokens before the first answer.
    """
    if dataset.manifest.settings.conversations:
        longest = dataset.manifest.longest
        if not dataset.samples("validation", longest):
            return []
        row = dataset.batch("validation", 0, 1, longest, 0)[0]
        return [int(id_) for id_ in row[: 1 + (row[:, 1] != IGNORED).argmax(), 0]]
    length = min(dataset.manifest.validation_tokens - 1, SAMPLE_BEGINS + SAMPLE_PROMPT)
    if length < 1:
        return []
    tokens = [int(token) for token in dataset.batch("validation", 0, 1, length, 0)[0]]
    return [token for token in tokens if token != dataset.manifest.end_of_document][-SAMPLE_PROMPT:]


def stops_of(dataset: Dataset) -> set[int]:
    """Returns the stop tokens: end of document and, for conversations, end of answer."""
    ends = {dataset.end_of_document}
    if dataset.manifest.settings.conversations:
        encoder = ChatEncoder(load_tokenizer(dataset.folder).definition)
        ends.add(ChatTemplate.read(dataset.folder).end_of_turn(encoder))
    return ends


@telling
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("trainfleet.engine.generate")
    parser.add_argument("run", type=Path)
    parser.add_argument("prompt", nargs="?", default="")
    parser.add_argument(
        "--chat", action="store_true", help="answer the prompt, or each line of stdin"
    )
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    parser.add_argument("--top-k", type=int, default=TOP_K)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="the same seed gives the same text")
    options = parser.parse_args(arguments)
    code = 0
    try:
        for text in (talk if options.chat else stream)(options):
            show_at_once(text)
    except KeyboardInterrupt:
        code = 0 if options.chat else 130  # as shells report SIGINT
    print()
    return code


def stream(options: argparse.Namespace) -> Iterator[str]:
    """Yields the prompt, followed by the generated text piece by piece.

    An end-of-document token precedes the prompt, because nearly every training document follows
    another one. Trailing spaces are stripped, because the space is usually part of the next word's
    token.
    """
    writer = Writer(options)
    prompt = options.prompt.rstrip(" ")
    ids = encode(writer.tokenizer, prompt)
    yield prompt
    yield from writer.after([writer.dataset.end_of_document, *ids])


def talk(options: argparse.Namespace) -> Iterator[str]:
    """Yields the answer to the prompt piece by piece. Without a prompt, answers each line of stdin.

    Raises:
        DataError: the run was not trained on conversations.
    """
    writer = Writer(options)
    if not writer.dataset.manifest.settings.conversations:
        raise DataError(
            "was not trained on conversations", where=str(options.run), next="make sample"
        )
    template = ChatTemplate.read(writer.dataset.folder)
    encoder, messages = ChatEncoder(writer.tokenizer.definition), Messages()
    for asked in [options.prompt] if options.prompt else typed():
        messages.append({"role": USER, "content": asked})
        with template.limited("the conversation"):
            ids = asking(template, encoder, messages)
        parts = list[str]()
        for part in writer.after(ids):
            parts.append(part)
            yield part
        messages.append({"role": ASSISTANT, "content": "".join(parts)})
        yield "\n"


def asking(template: ChatTemplate, encoder: ChatEncoder, messages: Messages) -> list[int]:
    """Tokenizes messages, followed by the start of an answer."""
    ids, _ = encoder.encode([template.render(messages, True)])
    return [int(id_) for id_ in unsigned(ids)]


def answers(model: Network, dataset: Dataset, prompts: Iterable[str]) -> Iterator[str]:
    """Yields the model's most likely continuation of each prompt, or answer to it."""
    assert isinstance(model, Llama | GPT2)
    tokenizer, stops = load_tokenizer(dataset.folder), stops_of(dataset)
    for prompt in prompts:
        ids = [dataset.end_of_document, *encode(tokenizer, prompt)]
        if dataset.manifest.settings.conversations:
            template = ChatTemplate.read(dataset.folder)
            asked = {"role": USER, "content": prompt}
            ids = asking(template, ChatEncoder(tokenizer.definition), [asked])
        made = continuation(
            model, ids, temperature=0, top_k=1, generator=torch.Generator(), stop_at=stops
        )
        yield tokenizer.decode(list(islice(made, SAMPLE_LENGTH)))


def typed() -> Iterator[str]:
    """Yields the lines that the user types, until the end of stdin (Ctrl-D)."""
    with suppress(EOFError):
        while True:
            show_at_once("> ")
            if line := input().encode(errors="replace").decode().strip():
                yield line


class Writer:
    """Text generator with a run's newest model and the given sampling options.

    Raises:
        RunError: the run has no checkpoint, or its model can't generate text.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.run = Run(options.run)
        model, self.dataset = load(self.run)
        if not isinstance(model, Llama | GPT2):
            family = model.shape.family
            raise RunError(
                f"{family} predicts masked tokens and can't generate text",
                where=str(self.run.folder),
                next="use make eval or make export",
            )
        self.model, self.tokenizer = model, load_tokenizer(self.dataset.folder)
        self.stops = stops_of(self.dataset)
        self.generator = torch.Generator()
        if options.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(options.seed)

    def after(self, ids: list[int]) -> Iterator[str]:
        """Yields the generated continuation of `ids`, piece by piece."""
        made = continuation(
            self.model,
            ids,
            temperature=self.options.temperature,
            top_k=self.options.top_k,
            generator=self.generator,
            stop_at=self.stops,
            top_p=self.options.top_p,
        )
        decoder = StreamDecoder(self.tokenizer)
        for id_ in ids:
            decoder.push(id_)
        try:
            yield from map(decoder.push, islice(made, self.options.tokens))
        except FloatingPointError:
            raise makes_no_numbers(self.run) from None


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids, _ = tokenizer.encode([text])
    return [int(id_) for id_ in ids]


def load(run: Run, device: torch.device | None = None) -> tuple[Network, Dataset]:
    """Loads a run's newest checkpoint onto `device`, and returns the model with its dataset.

    `device` defaults to the fastest one on this machine.

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
    return model.to(device or devices.nearest().torch_device).eval(), open_dataset(config)


if __name__ == "__main__":
    run_program(main)
