"""The model of bench_train.py in others' trainers: `peers_train.py bare|compiled|hf|litgpt[-bf16] STEPS [THREADS]`.

Prints the median tokens/s of the steps after the first WARM_UP. Every trainer gets a fresh batch of random tokens per step, clips to a
norm of 1, computes in fp32 as they all do on a CPU unless told, or by its own way to bf16, and logs every 10 steps. `hf` and
`litgpt` need an interpreter that has them.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

VOCABULARY, WIDTH, LAYERS, HEADS, INNER, LENGTH, BATCH = 8192, 384, 6, 6, 1024, 256, 8
WARM_UP = 4  # steps, compilation among them


def rows(count: int) -> torch.Tensor:
    return torch.randint(
        0, VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(1)
    )


def report(stamps: list[float]) -> None:
    """`stamps`: when each step ended."""
    seconds = statistics.median(
        after - before
        for before, after in zip(stamps[WARM_UP:], stamps[WARM_UP + 1 :], strict=False)
    )
    print(f"== {BATCH * LENGTH / seconds:.1f}", flush=True)


def bare_step(half: bool, compiled: bool) -> Callable[[torch.Tensor], None]:
    """A step on a batch as a tutorial has it, around our modules; `compiled` as a whole."""
    from trainfleet import models
    from trainfleet.config.types import Model

    model: Any = models.build(
        Model(
            "b", "llama", LAYERS, WIDTH, HEADS, HEADS, INNER, VOCABULARY, LENGTH, 1e4, 1e-5, False
        )
    )
    model.initialize(1)
    model = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(batch: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(batch[:, :-1], targets=batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare(steps: int, half: bool, compiled: bool = False) -> None:
    step, stamps = bare_step(half, compiled), []
    for batch in rows(steps * BATCH).split(BATCH):
        step(batch)
        stamps.append(time.perf_counter())
    report(stamps)


def hf(steps: int, half: bool) -> None:
    """transformers' Trainer with its LlamaForCausalLM."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=INNER,
        max_position_embeddings=LENGTH, tie_word_embeddings=False,
    )  # fmt: skip
    data = [{"input_ids": row[:-1], "labels": row[:-1]} for row in rows(steps * BATCH)]
    stamps: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            stamps.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, logging_steps=10, save_strategy="no", report_to=[],
            use_cpu=True, disable_tqdm=True, bf16=half,
        )  # fmt: skip
        Trainer(LlamaForCausalLM(shape), options, train_dataset=data, callbacks=[Clock()]).train()
    report(stamps)


def litgpt(steps: int, half: bool) -> None:
    """litgpt's pretraining loop, which compiles the whole model."""
    import lightning
    from litgpt import pretrain
    from litgpt.args import EvalArgs, LogArgs, TrainArgs
    from litgpt.config import Config
    from torch.utils.data import DataLoader

    stamps: list[float] = []

    class Rows:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for row in rows(steps * BATCH).split(BATCH):
                stamps.append(time.perf_counter())
                yield row
            report(stamps)
            sys.exit()  # before its validation and its save, which wants a tokenizer

    class Data(lightning.LightningDataModule):  # type: ignore[misc]
        def connect(self, **named: Any) -> None: ...

        def setup(self, stage: str = "") -> None: ...

        def train_dataloader(self) -> Any:
            class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc,type-arg]
                def __iter__(self) -> Iterator[torch.Tensor]:
                    return iter(Rows())

            return DataLoader(Stream(), batch_size=None)

        def val_dataloader(self) -> Any:
            return DataLoader(list(rows(BATCH)), batch_size=BATCH)

    shape = Config(
        name="small", block_size=LENGTH, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY, n_layer=LAYERS, n_head=HEADS,
        n_embd=WIDTH, intermediate_size=INNER, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        train = TrainArgs(
            save_interval=None, log_interval=10, global_batch_size=BATCH, micro_batch_size=BATCH, max_tokens=10**9,
            max_norm=1.0, max_seq_length=LENGTH, lr_warmup_steps=1, min_lr=1e-4, tie_embeddings=False,
        )  # fmt: skip
        pretrain.setup(
            "small", model_config=shape, out_dir=folder, precision="bf16-mixed" if half else "32-true", data=Data(), train=train,
            eval=EvalArgs(interval=10**6, max_iters=1, initial_validation=False, final_validation=False), log=LogArgs(),
            devices=1, logger_name="csv",
        )  # fmt: skip


if __name__ == "__main__":
    (name, _, half), count = sys.argv[1].partition("-"), int(sys.argv[2])
    torch.set_num_threads(int(sys.argv[3]) if len(sys.argv) > 3 else torch.get_num_threads())
    trainers: dict[str, Callable[[int, bool], None]] = {
        "bare": bare,
        "compiled": partial(bare, compiled=True),
        "hf": hf,
        "litgpt": litgpt,
    }
    trainers[name](count, half == "bf16")
