"""Checks every value in a checkpoint: `python -m trainfleet.engine.checkpoint.verify ADDRESS`.

`make verify` checks the checksums first. This module checks that the index covers every tensor
completely, that torch can read each tensor, and that all values are finite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import Tensor

from ...checkpoints.init_from import locate
from ...trust.errors import RunError, telling
from ...trust.safe_output import run_program
from .files import Reader
from .resuming import fill

KINDS = {
    "model": "weights",
    "random": "random states",
    "exp_avg": "first moments",
    "exp_avg_sq": "second moments",
    "step": "step counts",
}


@telling
def main(arguments: list[str]) -> int:
    store, step = locate(arguments[0])
    commit = store.read(step)
    count, numbers, wrong = Counter[str](), Counter[str](), list[str]()
    for name, tensor in tensors(Reader(store, commit)):
        kind = kind_of(name)
        count[kind] += 1
        numbers[kind] += tensor.numel()
        if not tensor.isfinite().all():
            wrong.append(name)
    for kind in count:
        print(f"{kind:<16} {numbers[kind]:>14,} numbers in {count[kind]:,} tensors")
    if wrong:
        raise RunError(
            f"has non-finite numbers in {', '.join(wrong)}",
            where=store.address(step),
            next="start from an older one: make train SET='name=again train.init_from=FOLDER'",
        )
    print("every tensor is complete and finite")
    return 0


def tensors(reader: Reader) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor with its name.

    Reads one tensor at a time, because a checkpoint may not fit in this machine's memory.
    """
    for name in reader.index:
        if (tensor := reader.room(name)) is not None:
            fill({name: tensor}, reader)
            yield name, tensor


def kind_of(name: str) -> str:
    """Returns a tensor's category for the summary, such as `weights`."""
    last = name.rsplit(".", 1)[-1]
    first, _, _ = name.partition(".")
    return KINDS.get(first, KINDS.get(last, last))


if __name__ == "__main__":
    run_program(main)
