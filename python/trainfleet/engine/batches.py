"""A rank's part of each global batch, fetched while the step before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from torch import Tensor

from ..config import Config
from ..devices import Device

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 [micro-batch, T] each


class Samples(Protocol):
    """What the engine needs of a dataset (data.dataset.Dataset)."""

    def samples(self, split: str, sequence_length: int) -> int: ...

    def batch(self, split: str, first: int, count: int, sequence_length: int, seed: int) -> np.ndarray: ...


class Batches:
    """The training batches of data-parallel rank `rank` of `ranks`.

    Step s (from 1) takes the samples [(s - 1) G, s G) of the seed's order, G being the global batch; rank r of R has the r-th
    of R equal parts of them. So what is trained on depends on the step alone, and any number of ranks can go on with it.
    """

    def __init__(self, samples: Samples, config: Config, rank: int, ranks: int, device: Device) -> None:
        self.samples, self.train, self.device = samples, config.train, device
        self.count = config.train.global_batch // ranks
        self.per_step = self.count // config.train.micro_batch  # micro-batches; the planner made sure that both divide
        self.offset = rank * self.count
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.ahead: tuple[int, Future[np.ndarray]] | None = None

    def of(self, step: int) -> Iterator[tuple[int, Batch]]:
        """The rank's micro-batches of one step, each with how many are left after it; the next step's are read meanwhile."""
        tokens, size = self._take(step), self.train.micro_batch
        for index in range(self.per_step):
            yield self.per_step - index - 1, split(self.device.place(tokens[index * size : (index + 1) * size]))

    def _take(self, step: int) -> np.ndarray:
        expected, future = self.ahead or (0, None)
        tokens = future.result() if future and expected == step else self._read(step)
        self.ahead = step + 1, self.reader.submit(self._read, step + 1)
        return tokens

    def _read(self, step: int) -> np.ndarray:
        train = self.train
        first = (step - 1) * train.global_batch + self.offset
        return self.samples.batch("train", first, self.count, train.sequence_length, train.seed)

    def close(self) -> None:
        self.reader.shutdown(cancel_futures=True)


def validation(samples: Samples, config: Config, rank: int, ranks: int, device: Device) -> Iterator[Batch]:
    """A rank's part of the validation sequences: the same ones at every validation, and for all ranks together at any number."""
    train = config.train
    count = validation_count(samples, config)
    for first in range(count * rank // ranks, end := count * (rank + 1) // ranks, train.micro_batch):
        size = min(train.micro_batch, end - first)
        yield split(device.place(samples.batch("validation", first, size, train.sequence_length, train.seed)))


def validation_count(samples: Samples, config: Config) -> int:
    """Sequences in one validation."""
    train = config.train
    return min(train.validation_sequences, samples.samples("validation", train.sequence_length))


def split(tokens: Tensor) -> Batch:
    """[count, T + 1] -> inputs and, one later, targets; of a masked model [count, T, 2 or 3], token, target and segment."""
    if tokens.ndim == 2:
        return tokens[:, :-1], tokens[:, 1:]
    return (tokens[..., ::2] if tokens.shape[2] == 3 else tokens[..., 0]), tokens[..., 1]
