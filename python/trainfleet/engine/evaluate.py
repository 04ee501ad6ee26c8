"""Evaluates a run's model on the validation split: `python -m trainfleet.engine.evaluate
RUN_FOLDER`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import devices
from ..config import load_resolved
from ..config.families import FAMILIES
from ..config.types import Train
from ..data import tokenizer as tokenizers
from ..data.dataset import Dataset
from ..models import GPT2, Bert, Llama, Network
from ..models.loss import IGNORED
from ..run.run_folder import Run
from ..trust.errors import telling
from ..trust.safe_output import run_program
from .batches import MicroBatch, Samples, samples_for, separator, split
from .generate import load, makes_no_numbers

SEQUENCES = 512  # maximum number of validation sequences
LARGEST = 700.0  # cap on the loss, so that exp(loss) stays finite


@dataclass(frozen=True)
class Scores:
    """Mean scores over all predicted tokens.

    `baseline` is the accuracy of always predicting the most common token.

    `bits_per_byte` is the loss in bits per UTF-8 byte of text, which is comparable across
    tokenizers. Masked models do not report it, because they predict only some of the tokens.
    """

    sequences: int
    loss: float
    perplexity: float
    accuracy: float
    baseline: float
    pair_accuracy: float | None = None  # accuracy of predicting whether segment B follows A
    bits_per_byte: float | None = None


@telling
def main(arguments: list[str]) -> int:
    run = Run(Path(arguments[0]))
    scores = evaluate(run)
    run.update_results(evaluation=asdict(scores))
    print("\n".join(describe(scores)))
    print(f"saved in {run.results}\nnext: make export OUT=folder")
    return 0


def describe(scores: Scores) -> Iterator[str]:
    """Yields one line of text per score, with a short explanation."""
    tokens = (
        "nats per predicted token; validation during training uses only "
        "train.validation_sequences of these sequences"
    )
    yield f"sequences      {scores.sequences:,} of the validation split"
    yield f"loss           {scores.loss:.4f}  {tokens}"
    yield f"perplexity     {scores.perplexity:,.2f}"
    if scores.bits_per_byte is not None:
        yield (
            f"bits per byte  {scores.bits_per_byte:.4f}  of UTF-8 text; comparable between "
            "tokenizers"
        )
    yield (
        f"accuracy       {scores.accuracy:.1%}  of the predictions; always predicting the most "
        f"common token: {scores.baseline:.1%}"
    )
    if scores.pair_accuracy is not None:
        yield f"pair accuracy  {scores.pair_accuracy:.1%}"


@torch.inference_mode()
def evaluate(run: Run) -> Scores:
    """Evaluates the newest checkpoint on the validation split.

    Raises:
        RunError: the run has no checkpoint, or the model's output is not finite.
    """
    model, dataset = load(run)
    config = load_resolved(run.config)
    count, totals, targets = score_all(model, samples_for(config, dataset), config.train)
    if not totals.isfinite().all():
        raise makes_no_numbers(run)
    loss, right, pairs, guesses = totals.tolist()
    causal = FAMILIES[config.model.family].causal
    return Scores(
        count,
        loss / guesses,
        perplexity=math.exp(min(loss / guesses, LARGEST)),
        accuracy=right / guesses,
        baseline=torch.cat(targets).bincount().max().item() / guesses,
        pair_accuracy=pairs / count if isinstance(model, Bert) else None,
        bits_per_byte=loss / math.log(2) / text_bytes(dataset, targets) if causal else None,
    )


def score_all(model: Network, samples: Samples, train: Train) -> tuple[int, Tensor, list[Tensor]]:
    """Returns the number of validation sequences, their summed scores, and the scored targets."""
    device, length = devices.nearest(), train.sequence_length
    count = max(1, min(SEQUENCES, samples.samples("validation", length)))
    totals, targets = torch.zeros(4, dtype=torch.float64), []
    for first in range(0, count, train.micro_batch_size):
        size = min(train.micro_batch_size, count - first)
        rows = samples.batch("validation", first, size, length, train.seed)
        batch = split(device.upload(rows), separator(samples, train))
        totals += score(model, batch)
        targets.append(batch.targets[mask(model, batch.targets)].cpu())
    return count, totals, targets


def text_bytes(dataset: Dataset, targets: list[Tensor]) -> int:
    """Returns the UTF-8 length of the decoded tokens. End-of-document tokens count as 0 bytes."""
    tokenizer = tokenizers.load(dataset.folder)
    return max(1, sum(len(tokenizer.decode(part.tolist()).encode()) for part in targets))


def score(model: Network, batch: MicroBatch) -> Tensor:
    """Returns a batch's summed loss and its counts of correct tokens, correct pairs and predicted
    tokens.
    """
    inputs, targets, documents, _ = batch
    x = (
        model.features(inputs, documents=documents)
        if isinstance(model, Llama | GPT2)
        else model.features(inputs)
    )
    head = model.get_submodule(model.plan.head.split(".")[0])
    chosen = mask(model, targets)
    logits, wanted = head(x[chosen]).float(), targets[chosen]
    loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
    pairs = (
        (model.pooler(x).argmax(-1) == targets[:, 0]).sum()
        if isinstance(model, Bert)
        else torch.zeros(())
    )
    right = (logits.argmax(-1) == wanted).sum()
    return torch.stack(
        [
            loss.double().cpu(),
            right.double().cpu(),
            pairs.double().cpu(),
            chosen.sum().double().cpu(),
        ]
    )


def mask(model: Network, targets: Tensor) -> Tensor:
    """Returns a mask that selects the targets to score.

    Excludes BERT's first target, which is the pair label.
    """
    chosen = targets != IGNORED
    if isinstance(model, Bert):
        chosen[:, 0] = False
    return chosen


if __name__ == "__main__":
    run_program(main)
