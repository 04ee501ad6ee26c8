"""Reads a rank's part of each global batch, prefetched while the step before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..config import Config
from ..config.families import FAMILIES
from ..config.types import Train
from ..data.dataset import Dataset
from ..data.masking import Masked
from ..devices import Device
from ..models.loss import IGNORED


class MicroBatch(NamedTuple):
    """A micro-batch of B sequences: inputs and targets, int64 [B, T] each (a masked model's inputs
    may be [B, T, 2]).

    `documents`, int32 [B, T], is each input's document in its sequence, from 0; None if attention
    ignores documents.
    """

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None = None

    @property
    def named(self) -> dict[str, Tensor]:
        """The model's keyword arguments other than the inputs."""
        return {"targets": self.targets} | (
            {} if self.documents is None else {"documents": self.documents}
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Applies a function to each of its tensors."""
        return MicroBatch(
            change(self.inputs),
            change(self.targets),
            None if self.documents is None else change(self.documents),
        )

    def blank(self, count: int) -> MicroBatch:
        """Returns `count` sequences of padding with all parts that a sequence of this batch has;
        they have no loss.
        """
        padding = self.each(lambda tokens: tokens.new_zeros((count, *tokens.shape[1:])))
        return padding._replace(targets=torch.full_like(padding.targets, IGNORED))


def join(batches: Sequence[MicroBatch]) -> MicroBatch:
    inputs, targets, documents = zip(*batches, strict=True)
    return MicroBatch(
        torch.cat(inputs),
        torch.cat(targets),
        None if documents[0] is None else torch.cat(documents),
    )


def filled(batches: Iterable[MicroBatch], passes: int, blank: MicroBatch) -> Iterator[MicroBatch]:
    """Yields `passes` batches of the size of `blank`: those given, padded with blank sequences,
    then blank batches.
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


class Samples(Protocol):
    """The parts of a dataset that the engine uses (data.dataset.Dataset)."""

    @property
    def end_of_document(self) -> int: ...

    def samples(self, split: str, sequence_length: int) -> int: ...

    def batch(
        self, split: str, first: int, count: int, sequence_length: int, seed: int
    ) -> np.ndarray: ...


def samples_for(config: Config, dataset: Dataset) -> Samples:
    """Returns the samples that a family of models trains on: the dataset's own, or with tokens
    masked.
    """
    family = FAMILIES[config.model.family]
    return (
        dataset if family.causal else Masked(dataset, family.objective == "pairs", family.guesses)
    )


class Batches:
    """The training batches of data-parallel rank `rank` of `ranks`.

    Step s (from 1) takes the samples [(s - 1) G, s G) of the seed's order, where G is the global
    batch; rank r of R has the r-th of R equal parts of them. So the data of a step depends only on
    the step, and any number of ranks can resume.
    """

    def __init__(
        self, samples: Samples, config: Config, rank: int, ranks: int, device: Device
    ) -> None:
        self.samples, self.train, self.device = samples, config.train, device
        self.end = separator(samples, config.train)
        self.count = config.train.global_batch_size // ranks
        # micro-batches; the planner made sure that both divide
        self.per_step = self.count // config.train.micro_batch_size
        self.offset = rank * self.count
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.ahead: tuple[int, Future[np.ndarray]] | None = None

    def of(self, step: int) -> Iterator[tuple[int, MicroBatch]]:
        """Yields the rank's micro-batches of one step, each with the number of those after it.
        Prefetches the next step's in the meantime.
        """
        tokens, size = self._take(step), self.train.micro_batch_size
        for index in range(self.per_step):
            yield (
                self.per_step - index - 1,
                split(self.device.upload(tokens[index * size : (index + 1) * size]), self.end),
            )

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
    samples: Samples, config: Config, rank: int, ranks: int, device: Device
) -> Iterator[MicroBatch]:
    """Yields a rank's part of the validation sequences, which are the same at every validation and
    for any number of ranks.
    """
    train, end = config.train, separator(samples, config.train)
    count = validation_count(samples, config)
    for first in range(
        count * rank // ranks, last := count * (rank + 1) // ranks, train.micro_batch_size
    ):
        size = min(train.micro_batch_size, last - first)
        yield split(
            device.upload(
                samples.batch("validation", first, size, train.sequence_length, train.seed)
            ),
            end,
        )


def validation_count(samples: Samples, config: Config) -> int:
    """Returns the number of sequences in one validation."""
    train = config.train
    return min(train.validation_sequences, samples.samples("validation", train.sequence_length))


def separator(samples: Samples, train: Train) -> int | None:
    """Returns the token that ends a document, if batches must mark documents."""
    return samples.end_of_document if train.document_mask else None


def split(tokens: Tensor, end: int | None = None) -> MicroBatch:
    """Splits [count, T + 1] into inputs and, one later, targets; for a masked model [count, T, 2 or
    3], token, target and segment.

    With the token that ends a document, also adds the documents.
    """
    if tokens.ndim == 2:
        return MicroBatch(
            tokens[:, :-1], tokens[:, 1:], None if end is None else documents(tokens[:, :-1], end)
        )
    return MicroBatch(tokens[..., ::2] if tokens.shape[2] == 3 else tokens[..., 0], tokens[..., 1])


def documents(tokens: Tensor, end: int) -> Tensor:
    """Returns for each token [B, T] the number of its document in its row, from 0: int32 [B, T]. An
    end token is the last of its document.
    """
    ends = (tokens == end).to(torch.int32)
    return ends.cumsum(1, dtype=torch.int32) - ends
