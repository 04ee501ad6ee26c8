"""A run on conversations, judged by transformers: the tokens, the mask, the loss of a step by hand, and the answers.

The run begins with another run's exported folder. Its first loss is that of the folder's weights on the first global batch, whatever
ranks and micro-batches share it.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from ranks import Bench

import chats
from requirement import need
from trainfleet.config import load_resolved
from trainfleet.data.chat import messages_of
from trainfleet.data.dataset import Dataset
from trainfleet.data.packing import IGNORED
from trainfleet.data.tokenizer import load
from trainfleet.engine import export, generate
from trainfleet.report import history, summary
from trainfleet.run.run_folder import Run

pytestmark = pytest.mark.timeout(300)
RECORDS = [chats.record(n) for n in range(200)]
LENGTH = 160
CONFIG = ranks.CONFIG.replace("[text]", "[a.jsonl]").replace("vocab_size: 384", chats.KEYS)
COMMON = {"train__sequence_length": LENGTH, "train__validate_every": 0}
ANSWERS = {"tokens": 24, "temperature": 0.0, "top_k": 1, "top_p": 1.0, "seed": 1}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    here, folder = Path.cwd(), tmp_path_factory.mktemp("chats")
    chats.folder(folder / "model", chats.TAGGED)
    chats.write(folder / "a.jsonl", RECORDS)
    yield Bench(folder, CONFIG)
    os.chdir(here)


@pytest.fixture(scope="module")
def exported(bench: Bench) -> Path:
    made = bench.train("base", 1, train__steps=60, train__learning_rate=0.01, **COMMON)
    export.export(Run(made), bench.folder / "out")
    return bench.folder / "out"


def by_transformers(tokenizer: Any) -> dict[tuple[int, ...], list[int]]:
    """Of each record's conversation: its ids, and which of them the assistant says."""
    found = [
        tokenizer.apply_chat_template(
            messages_of(record, ""), return_dict=True, return_assistant_tokens_mask=True
        )
        for record in RECORDS
    ]
    return {tuple(each["input_ids"]): each["assistant_masks"] for each in found}


@torch.no_grad()
def test_the_loss_of_a_step_is_transformers_mean_over_what_the_assistant_says(
    bench: Bench, exported: Path
) -> None:
    transformers = need("transformers")
    known = by_transformers(transformers.AutoTokenizer.from_pretrained(exported))
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    start = {"train__steps": 1, "train__init_from": str(exported), **COMMON}
    losses = {}
    for name, size, micro in (("one", 1, 8), ("one-4", 1, 2), ("two", 2, 2), ("four", 4, 1)):
        run = bench.train(name, size, **start, train__micro_batch_size=micro)
        losses[name] = ranks.metrics(run)[0]["loss"]
    config = load_resolved(Run(run).config)
    dataset, total, count = Dataset.open(Path("data/text"), config.data), 0.0, 0
    for row in dataset.batch("train", 0, 8, LENGTH, config.train.seed):
        for number in range(row[:, 2].max() + 1):
            own = row[row[:, 2] == number]
            mask = torch.tensor(known[tuple(own[:, 0].tolist())], dtype=torch.bool)
            assert (own[:-1, 1] != IGNORED).tolist() == mask[1:].tolist()
            ids = torch.tensor(own[:, 0])
            scores = model(ids[None]).logits[0, :-1].log_softmax(-1)
            said = scores.gather(1, ids[1:, None])[mask[1:], 0]
            total, count = total - float(said.double().sum()), count + len(said)
    assert losses == pytest.approx(dict.fromkeys(losses, total / count), abs=1e-6)


def test_the_exported_folder_answers_as_make_chat_does(bench: Bench, exported: Path) -> None:
    transformers = need("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    ends = model.generation_config.eos_token_id
    assert sorted(tokenizer.convert_ids_to_tokens(ends)) == ["<|endoftext|>", "<|im_end|>"]
    stopped = 0
    for asked in ("how much is 3 and 3?", "how much is 40 and 5?", "so?"):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        made = model.generate(
            ids, do_sample=False, max_new_tokens=ANSWERS["tokens"], pad_token_id=0
        )
        text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        options = argparse.Namespace(run=bench.folder / "runs/base", prompt=asked, **ANSWERS)
        assert "".join(generate.talk(options)) == f"{text}\n"
        stopped += int(made[0, -1]) in ends
    assert stopped


def test_a_run_killed_goes_on_to_the_same_bits(bench: Bench) -> None:
    whole, again = (
        bench.prepare(name, 2, **{"train.sequence_length": LENGTH, "train.global_batch_size": 16})
        for name in ("whole", "killed")
    )
    ranks.go_on_after_a_kill(bench, whole, again, 2, ranks.__file__)


def test_a_chat_keeps_what_was_said_and_ends_with_ctrl_d_and_ctrl_c(
    bench: Bench,
    exported: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard: list[list[int]] = []
    after = generate.Writer.after

    def listening(writer: generate.Writer, ids: list[int]) -> Iterator[str]:
        heard.append(ids)
        return after(writer, ids)

    monkeypatch.setattr(generate.Writer, "after", listening)
    monkeypatch.setattr("sys.stdin", io.StringIO("how much is 3 and 3?\n\nand now?\n"))
    words = [
        "--chat",
        "--temperature",
        "0",
        "--tokens",
        "20",
        "--",
        str(bench.folder / "runs/base"),
        "",
    ]
    assert generate.main(words) == 0 and len(heard) == 2
    said = capsys.readouterr().out.split("> ")[1].rstrip("\n")
    tokenizer = Dataset.open(Path("data/text")).folder / "tokenizer.json"
    text = load(tokenizer).reference.tokenizer.decode(heard[1], skip_special_tokens=False)
    assert f"<|im_start|>assistant\n{said}<|im_end|>\n<|im_start|>user\nand now?<|im_end|>" in text
    monkeypatch.undo()
    command = [sys.executable, "-m", "trainfleet.engine.generate", *words]
    with subprocess.Popen(
        command, cwd=bench.folder, env=ranks.environment(), stdin=-1, stdout=-1, stderr=-1
    ) as chat:
        assert chat.stdout is not None and chat.stderr is not None and chat.stdout.read(2) == b"> "
        time.sleep(1)  # until it reads what is typed
        chat.send_signal(signal.SIGINT)
        assert chat.wait(30) == 0 and not chat.stderr.read()


@pytest.mark.parametrize("format_", ["fp32", "bf16"])  # DDP's model, and one that FSDP replicates
def test_prompts_are_answered_at_each_validation_and_training_stays_the_same(
    bench: Bench, format_: str
) -> None:
    short = COMMON | {"train__steps": 8, "train__validate_every": 4}
    short |= {"train__param_dtype": format_, "train__precision": format_}
    plain = bench.train("plain", 2, **short)
    asked = bench.train("asked", 2, **short, train__sample_prompts="[so,why]")
    assert ranks.metrics(plain) == ranks.metrics(asked)
    found = ranks.events(asked, "sampled")
    assert [(event["step"], event["prompt"]) for event in found] == [
        (step, prompt) for step in (4, 8) for prompt in ("so", "why")
    ]
    options = argparse.Namespace(
        run=asked, prompt="why", **ANSWERS | {"tokens": generate.SAMPLE_LENGTH}
    )
    assert "".join(generate.talk(options)) == f"{found[-1]['text']}\n" != "\n"
    assert "make chat" in str(summary.next_commands(history.read(Run(asked))))
