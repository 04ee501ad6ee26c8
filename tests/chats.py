"""A small tokenizer with a chat template in a model's folder, conversations, and a dataset of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from trainfleet.config.types import Data
from trainfleet.data.tokenize_worker import Share, tokenize

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The same text, with the tags of transformers (the form in TRL's training templates)
TAGGED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
KEYS = "conversations: true, tokenizer: ./model"  # of data in a config
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<think>", "</think>", "<|end|>"]  # fmt: skip


def folder(path: Path, template: str | None = CHATML, **settings: Any) -> Path:
    """A model's folder with its tokenizer, as transformers writes it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([text for n in range(40) for text in turns(n)], trainer)
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    given = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "bos_token": "<s>",
    }
    given |= {} if template is None else {"chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(given | settings))
    return path


def turns(number: int) -> list[str]:
    asked = f"how much is {number} and {number % 7}?"
    return [asked, f"{number} and {number % 7} is {number + number % 7}, naïve 😀"]


def record(number: int) -> dict[str, Any]:
    """A conversation of one to three turns, or a prompt and its completion."""
    said = [
        {"role": role, "content": text}
        for n in range(number, number + 1 + number % 3)
        for role, text in zip(("user", "assistant"), turns(n), strict=True)
    ]
    if number % 5 == 4:
        return dict(zip(("prompt", "completion"), turns(number), strict=True))
    system = [{"role": "system", "content": "Add."}] if number % 2 else []
    return {"messages": system + said}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def data_of(source: Path, tokenizer: Path, **other: Any) -> Data:
    return Data(
        "chat", (str(source),), tokenizer=str(tokenizer), validation_fraction=0.2, conversations=True, **other
    )  # fmt: skip


def tokenized(data: Data) -> Any:
    return tokenize(data, Share(0, 1, 1))
