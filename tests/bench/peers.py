"""What others do with the same corpus and tokenizer, as they document it: `peers.py NAME CORPUS TOKENIZER OUT WORKERS`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def datatrove(corpus: str, tokenizer: str, out: str, workers: int) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        JsonlReader(corpus, glob_pattern="*.jsonl"),
        DocumentTokenizer(
            out,
            tokenizer_name_or_path=tokenizer,
            eos_token="<|endoftext|>",
            shuffle_documents=False,
        ),
    ]
    LocalPipelineExecutor(
        steps,
        tasks=len(list(Path(corpus).glob("*.jsonl"))),
        workers=workers,
        logging_dir=f"{out}/logs",
    ).run()


def datasets(corpus: str, tokenizer: str, out: str, workers: int) -> None:
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    encoder = PreTrainedTokenizerFast(tokenizer_file=tokenizer)

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "input_ids": encoder(
                batch["text"], add_special_tokens=False, return_attention_mask=False
            )["input_ids"]
        }

    files = sorted(map(str, Path(corpus).glob("*.jsonl")))
    texts = load_dataset("json", data_files=files, split="train", cache_dir=f"{out}/cache")
    texts.map(
        encode, batched=True, num_proc=workers, remove_columns=texts.column_names
    ).save_to_disk(f"{out}/set")


if __name__ == "__main__":
    {"datatrove": datatrove, "datasets": datasets}[sys.argv[1]](*sys.argv[2:5], int(sys.argv[5]))
