"""What our training step costs beside a bare PyTorch loop: `python tests/bench/bench_step.py [STEPS]`, one process, one thread.

The two take turns, a step each: our loop, run whole as a job runs it (reading ahead, vote, guard, a line of metrics with
TensorBoard every 10 steps), makes the bare step inside its own step boundary. So whatever else the machine does hits both alike.
The figure is the median of the pairs' ratios, in CPU seconds of the process, ours with all its threads.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from trainfleet import models
from trainfleet.config import Config, Settings, dump_resolved, load
from trainfleet.data.dataset import Dataset
from trainfleet.data.tokenize_worker import Share, tokenize
from trainfleet.engine import __main__ as job
from trainfleet.engine.vote import Vote
from trainfleet.run import run_folder

WARM_UP = 3  # pairs that don't count


def bare_step(config: Config) -> Callable[[], None]:
    """One step of a loop as a tutorial has it, on a batch that is there already."""
    train = config.train
    model = models.build(config.model)
    model.initialize(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    samples = Dataset.open(run_folder.DATA / config.data.name)
    tokens = torch.from_numpy(
        samples.batch("train", 0, train.global_batch_size, train.sequence_length, 1)
    )

    def step() -> None:
        for part in tokens.split(train.micro_batch_size):
            logits = model(part[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / (
                train.global_batch_size // train.micro_batch_size
            )
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Turnstile(Vote):
    """The vote that each of our steps ends with, and behind it a bare step."""

    bare: Callable[[], None]
    pairs: list[tuple[float, float]]
    left = 0.0

    def agreed(self, *wish: Any) -> Any:
        answer = super().agreed(*wish)
        began = time.process_time()
        self.bare()
        ended = time.process_time()
        if self.left:
            self.pairs.append((began - self.left, ended - began))
        type(self).left = ended
        return answer


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("config.yaml").write_text(
            f"name: bench\nfleet: {{nodes: 1}}\ntrain: {{steps: {steps}, validate_every: 0, precision: fp32}}\ncheckpoint: {{every: 1000000}}\n"
        )
        config, _ = load(Settings(Path("config.yaml")))
        tokenize(config.data, Share(0, 1, 1))
        run = run_folder.run_of(config.name)
        run_folder.write_atomic(run.config, dump_resolved(config))
        Turnstile.bare, Turnstile.pairs = staticmethod(bare_step(config)), []
        job.Vote = Turnstile  # type: ignore[misc]
        job.main([str(run.folder)])
    pairs = Turnstile.pairs[WARM_UP:]
    ours, bare = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(mine / other for mine, other in pairs)
    tokens = config.train.global_batch_size * config.train.sequence_length
    print(
        f"{len(pairs)} pairs of {tokens} tokens: ours {ours:.4f} s = {tokens / ours:,.0f} tokens/s, bare {bare:.4f} s"
    )
    print(
        f"overhead {100 * (statistics.median(ratios) - 1):+.2f} % (middle half {_percent(ratios, 1)} to {_percent(ratios, 3)})"
    )


def _percent(ratios: list[float], quarter: int) -> str:
    return f"{100 * (ratios[len(ratios) * quarter // 4] - 1):+.2f} %"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
