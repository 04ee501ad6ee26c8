"""Reads each rank's share of the global batch and prefetches the next step's share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..config import Config
from ..config.families import FAMILIES
from ..config.types import Train
from ..data.dataset import Dataset
from ..data.manifest import VALIDATION
from ..data.masking import Masked
from ..devices import Device
from ..models.loss import IGNORED
from ..run import run_folder

Samples = Dataset | Masked


class MicroBatch(NamedTuple):
    """Micro-batch of B sequences.

    `inputs` and `targets` are int64 [B, T]; a masked model's inputs may be [B, T, 2].

    `documents` is int32 [B, T], the index of each token's document in its sequence, or None if
    attention crosses document boundaries.

    `learned` is the global batch's number of loss targets, divided by the number of data-parallel
    ranks. None means that all sequences have the same number.
    """

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None = None
    learned: float | None = None

    def averaged(self, passes: int, parts: int = 1) -> tuple[str, float]:
        """Returns the loss reduction for this batch, and the divisor that turns the loss into this
        rank's term of the global mean.

        Args:
            passes: Number of micro-batches per rank and step.
            parts: Number of ranks that share each sequence.
        """
        return ("mean", passes) if self.learned is None else ("sum", self.learned / parts)

    @property
    def named(self) -> dict[str, Tensor]:
        """Keyword arguments for the model, in addition to the inputs."""
        return {"targets": self.targets} | (
            {} if self.documents is None else {"documents": self.documents}
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Returns a copy of the micro-batch with a function applied to each tensor."""
        return MicroBatch(
            change(self.inputs),
            change(self.targets),
            None if self.documents is None else change(self.documents),
            self.learned,
        )

    def blank(self, count: int) -> MicroBatch:
        """Returns `count` padding sequences with the same fields as this batch.

        The loss ignores padding.
        """
        padding = self.each(lambda tokens: tokens.new_zeros((count, *tokens.shape[1:])))
        return padding._replace(targets=torch.full_like(padding.targets, IGNORED))


def join(batches: Sequence[MicroBatch]) -> MicroBatch:
    inputs, targets, documents, learned = zip(*batches, strict=True)
    return MicroBatch(
        torch.cat(inputs),
        torch.cat(targets),
        None if documents[0] is None else torch.cat(documents),
        learned[0],
    )


def filled(batches: Iterable[MicroBatch], passes: int, blank: MicroBatch) -> Iterator[MicroBatch]:
    """Yields exactly `passes` batches of the same size as `blank`.

    Pads short batches with blank sequences, then appends blank batches.
    """
    found = iter(batches)
    for _ in range(passes):
        given = next(found, None)
        if given is None:
            yield blank
        else:
            yield join(
                [given, blank.each(itemgetter(slice(len(blank.inputs) - len(given.inputs))))]
            )


def open_dataset(config: Config) -> Dataset:
    """Opens the configured dataset and checks that the model's embedding covers its token ids."""
    dataset = Dataset.open(run_folder.DATA / config.data.name, config.data)
    dataset.check_vocabulary(config.model.vocab_size)
    return dataset


def samples_for(config: Config, dataset: Dataset) -> Samples:
    """Returns the training samples for the model family.

    Causal models use the dataset directly, and masked models use a masked version.
    """
    family = FAMILIES[config.model.family]
    return (
        dataset if family.causal else Masked(dataset, family.objective == "pairs", family.guesses)
    )


class Batches:
    """Training batches for data-parallel rank `rank` of `ranks`.

    With global batch size G, step s (from 1) uses samples [(s - 1) G, s G) in an order determined
    by the seed. Each rank reads an equal share. A step's data does not depend on earlier steps, so
    a run can resume with any number of ranks.
    """

    def __init__(
        self, samples: Samples, config: Config, rank: int, ranks: int, device: Device
    ) -> None:
        self.samples = samples
        self.train = config.train
        self.device = device
        self.end = separator(samples, config.train)
        self.count = config.train.global_batch_size // ranks
        self.ranks = ranks
        # micro-batches per step; the planner ensures that both divisions are exact
        self.per_step = self.count // config.train.micro_batch_size
        self.offset = rank * self.count
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.ahead: tuple[int, Future[np.ndarray]] | None = None

    def of(self, step: int) -> Iterator[tuple[int, MicroBatch]]:
        """Yields (micro-batches left, micro-batch) for each of the step's micro-batches.

        Prefetches the next step's data in the meantime.
        """
        train, size = self.train, self.train.micro_batch_size
        first, count = (step - 1) * train.global_batch_size, train.global_batch_size
        tokens = self._take(step)
        # Each rank knows the global batch's target count, so no collective is needed.
        learned = self.samples.learned("train", first, count, train.sequence_length, train.seed)
        share = None if learned is None else learned / self.ranks
        for index in range(self.per_step):
            part = split(self.device.upload(tokens[index * size : (index + 1) * size]), self.end)
            yield self.per_step - index - 1, part._replace(learned=share)

    def _take(self, step: int) -> np.ndarray:
        expected, future = self.ahead or (0, None)
        tokens = future.result() if future and expected == step else self._read(step)
        self.ahead = step + 1, self.reader.submit(self._read, step + 1)
        return tokens

    def _read(self, step: int) -> np.ndarray:
        train = self.train
        first = (step - 1) * train.global_batch_size + self.offset
        return self.samples.batch("train", first, self.count, train.sequence_length, train.seed)


def validation(
    samples: Samples, config: Config, rank: int, ranks: int, device: Device, part: str = VALIDATION
) -> Iterator[MicroBatch]:
    """Yields this rank's share of a split's validation sequences.

    The sequences are the same in every validation and for any number of ranks. The last batch of a
    mixture's source is padded to the compiled shape.
    """
    train, end = config.train, separator(samples, config.train)
    count = validation_count(samples, config, part)
    for first in range(
        count * rank // ranks, last := count * (rank + 1) // ranks, train.micro_batch_size
    ):
        size = min(train.micro_batch_size, last - first)
        rows = samples.batch(part, first, size, train.sequence_length, train.seed)
        batch = split(device.upload(rows), end)
        if part != VALIDATION:
            batch = join([batch, batch.blank(train.micro_batch_size - size)])
        yield batch


def validation_count(samples: Samples, config: Config, split: str = VALIDATION) -> int:
    """Returns the number of sequences to use when validating a split.

    A mixture's sources share `train.validation_sequences` equally.
    """
    train = config.train
    most = train.validation_sequences // (
        1 if split == VALIDATION else len(samples.validation_parts)
    )
    return min(most, samples.samples(split, train.sequence_length))


def separator(samples: Samples, train: Train) -> int | None:
    """Returns the end-of-document token if batches must track document boundaries,
    otherwise None.
    """
    return samples.end_of_document if train.document_mask else None


def split(tokens: Tensor, end: int | None = None) -> MicroBatch:
    """Splits tokens [count, T + 1] into inputs and targets, shifted by one token.

    Masked models and conversations instead provide [count, T, 2 or 3]: token, target, and
    optionally a segment or document index. The batch contains document indices only if `end`, the
    end-of-document token, is given.
    """
    if tokens.ndim == 2:
        return MicroBatch(
            tokens[:, :-1], tokens[:, 1:], None if end is None else documents(tokens[:, :-1], end)
        )
    if end is not None:
        return MicroBatch(tokens[..., 0], tokens[..., 1], tokens[..., 2].to(torch.int32))
    return MicroBatch(tokens[..., ::2] if tokens.shape[2] == 3 else tokens[..., 0], tokens[..., 1])


def documents(tokens: Tensor, end: int) -> Tensor:
    """Returns each token's document index within its row, as int32 [B, T] from 0.

    An end-of-document token belongs to the document that it ends.
    """
    ends = (tokens == end).to(torch.int32)
    return ends.cumsum(1, dtype=torch.int32) - ends
