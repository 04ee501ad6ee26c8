"""The loss of a large vocabulary: whole, in pieces that backward computes again, and in pieces that keep their gradients.

`python tests/bench/bench_loss.py [TURNS]`: in each turn every way has a process of one thread, one after the other, and the next turn
begins with another way. Figures: CPU seconds of a forward and backward pass, their median and their least; the median of what "again"
takes for each second of "kept" in the same turn; and what the process takes at its most, beyond what it had before.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainfleet.models import loss

TOKENS, WIDTH, VOCABULARY, PIECE = 512, 256, 128_256, 1 << 26
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def again(x: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """As it was to commit a3caa76: torch.utils.checkpoint around each piece."""

    def one(part: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(head(part).float(), wanted, reduction="sum")

    pieces = -(-TOKENS * VOCABULARY * 4 // PIECE)
    parts = zip(x.flatten(0, 1).chunk(pieces), targets.flatten().chunk(pieces), strict=True)
    return (
        torch.stack([checkpoint(one, *part, use_reentrant=False) for part in parts]).sum() / TOKENS
    )


WAYS: dict[str, Callable[[Tensor, nn.Linear, Tensor], Tensor]] = {
    "whole": loss.next_token_loss, "again": again, "kept": loss.next_token_loss,
}  # fmt: skip


def turn(way: str, format: str) -> None:
    loss.LOGITS_BYTES = 1 << 40 if way == "whole" else PIECE
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    with torch.device("meta"):
        head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = nn.Parameter(
        torch.randn(VOCABULARY, WIDTH, generator=generator).mul_(0.02).to(FORMATS[format])
    )
    x = torch.randn(1, TOKENS, WIDTH, generator=generator).to(FORMATS[format]).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    (x[:, :8] @ head.weight[:64].T).sum().backward()  # libraries are loaded
    head.weight.grad = None
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    value = WAYS[way](x, head, targets)
    value.backward()
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert head.weight.grad is not None
    norm = float(head.weight.grad.float().norm())
    print(json.dumps({"seconds": seconds, "MiB": peak / 1024, "loss": value.item(), "norm": norm}))


def main(turns: int) -> None:
    for format in FORMATS:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(turns):
            for way in rotated(list(WAYS), number):
                words = [sys.executable, __file__, way, format]
                done = subprocess.run(
                    words,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    check=True,
                )
                found[way].append(json.loads(done.stdout))
        for way, taken in found.items():
            seconds, most = [each["seconds"] for each in taken], max(each["MiB"] for each in taken)
            print(
                f"{format} {way}: median {median(seconds):.2f} s, least {min(seconds):.2f}, {most:,.0f} MiB, {taken[0]}",
                flush=True,
            )
        ratios = [
            again["seconds"] / kept["seconds"]
            for again, kept in zip(found["again"], found["kept"], strict=True)
        ]
        print(
            f"{format} again / kept: median {median(ratios):.2f} of {turns}, {min(ratios):.2f} to {max(ratios):.2f}",
            flush=True,
        )


def rotated(ways: list[str], number: int) -> list[str]:
    """The ways, beginning with another one each turn."""
    first = number % len(ways)
    return ways[first:] + ways[:first]


if __name__ == "__main__":
    turn(*sys.argv[1:]) if len(sys.argv) == 3 else main(int(sys.argv[1]) if sys.argv[1:] else 5)
