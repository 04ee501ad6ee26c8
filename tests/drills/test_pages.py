"""The pages as a reader follows them: each command of a page is typed, in order, beside the config that the page shows.

What a page says of a fleet or an account is planned here. Other drills carry it out on real sshd nodes, a real Slurm and a
pretended account.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import pages
import verbs
from trainfleet.run.run_folder import read_json

SMALL = {
    "fleet": {"backend": "local", "nodes": 1},
    "train": {"steps": 12, "global_batch_size": 8, "sequence_length": 32, "precision": "fp32"},
    "checkpoint": {"every": 6},
}
DATA = {"name": "mine", "sources": ["texts"], "vocab_size": 340}
TINY = {"layers": 2, "hidden_size": 32, "heads": 2, "intermediate_size": 64}
NOT_TYPED = {
    "make watch": "test_page.py looks at its page",
    "make watch RUN=one": "test_report_server.py reads its page",
    "make watch RUN=first-run": "test_report_server.py reads its page",
    "make plan TOKENS=1e12 DAYS=14": "test_docs.py types it beside the config that the page shows",
    "make config RECIPE=roberta-large-p3dn-ec2": "test_docs.py plans every recipe",
    "make rehearse": "test_rehearsal.py plays all faults",
    "make chat": "test_fine_tuning.py talks to a model that it has fine-tuned",
    "make eval TASKS=hellaswag": "its tasks come from the Hub",
}
CONFIGS = {path: yaml.safe_load(text) for path, text in pages.configs()}


class Desk:
    """A folder with a small config of the page's kind and some text."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        whole = {
            part: SMALL.get(part, {})
            | (value if isinstance(value := config.get(part, {}), dict) else {})
            for part in SMALL
        }
        (folder / "config.yaml").write_text(
            yaml.safe_dump(config | whole | {"train": config.get("train", {}) | SMALL["train"]})
        )
        verbs.write_text(folder / "texts")
        self.folder = folder

    def follow(self, page: str) -> dict[str, str]:
        """Types the commands of a page; what each says."""
        return self.type_all(pages.commands(pages.ROOT / page))

    def type_all(self, commands: list[str]) -> dict[str, str]:
        """Types these; what each says, the first time if it is typed twice."""
        said: dict[str, str] = {}
        for command in commands:
            if command.startswith("make ") and command not in NOT_TYPED:
                said.setdefault(command, self.type(command))
        return said

    def type(self, command: str) -> str:
        """What a command says that ends well; a question is answered with yes."""
        words = shlex.split(command)[1:]
        return verbs.enter(self.folder, *words, *(["YES=1"] if "PURGE=1" in words else []))

    def results(self, name: str) -> Any:
        return read_json(self.folder / "runs" / name / "results.json")


def test_a_reader_can_follow_the_page_of_this_machine(tmp_path: Path) -> None:
    desk = Desk(tmp_path, {"name": "first-run", "data": DATA, "model": {"preset": "tiny"}})
    said = desk.follow("docs/start/laptop.md")
    assert "wider" in said["make compare RUNS='first-run wider'"]
    assert not (tmp_path / "runs/first-run/results.json").exists()  # PURGE=1


def test_a_reader_can_follow_the_readme(tmp_path: Path) -> None:
    """Its blocks first, then the commands in its sentences and tables, which begin where the blocks have ended."""
    page = pages.ROOT / "README.md"
    desk = Desk(tmp_path, {"name": "first-run", "data": DATA, "model": {"preset": "tiny"}})
    said = desk.follow("README.md")
    printed, drawn = (
        summary(lines)
        for lines in (
            said["make train"].splitlines(),
            pages.drawn(page.parent / "docs/first-run.svg"),
        )
    )
    assert set(drawn) - {"remark", "skipped"} <= set(printed)  # these two are not of every run
    desk.type_all(pages.mentioned(page))


def summary(lines: list[str]) -> list[str]:
    """The first words of the lines with which a run ends."""
    words = [line.split()[0] for line in lines if line[:1].isalpha()]
    return words[words.index("first-run") : words.index("next") + 1]


def test_a_reader_can_train_on_text_of_their_own(tmp_path: Path) -> None:
    shown = yaml.safe_load(pages.blocks(pages.ROOT / "docs/how-to/text.md", "yaml")[0])
    here = [source for source in shown["data"]["sources"] if not re.match("(s3|hf)://", source)]
    desk = Desk(
        tmp_path,
        {
            "name": "mine",
            "data": shown["data"] | {"sources": here, "vocab_size": 340},
            "model": TINY,
        },
    )
    verbs.write_text(tmp_path / "my-texts")
    write_records(tmp_path)
    desk.follow("docs/how-to/text.md")
    assert desk.results("mine")["status"] == "finished"


def test_a_reader_can_train_a_small_nanochat(tmp_path: Path) -> None:
    """Fewer steps than the page has, on some text."""
    desk = Desk(tmp_path, {})
    desk.type("make config RECIPE=nanochat-d20-p5-ec2 YES=1")
    (small,) = [
        command
        for command in pages.commands(pages.ROOT / "docs/how-to/nanochat.md")
        if "make train" in command
    ]
    words = small.replace("data.vocab_size=2048", "data.vocab_size=340 data.sources=[texts]")
    desk.type(words.replace("train.steps=200", "train.steps=12"))
    found = desk.results("d2")
    assert found["status"] == "finished" and found["final_loss"] < found["first_loss"]


def test_a_reader_can_continue_a_model_and_hand_it_to_transformers(tmp_path: Path) -> None:
    page = pages.ROOT / "docs/how-to/hugging-face.md"
    shown = CONFIGS["docs/how-to/hugging-face.md"]
    text = json.dumps(shown).replace("hf://Qwen/Qwen3-0.6B", "./qwen3")
    make_qwen3(tmp_path / "qwen3", verbs.write_text(tmp_path / "my-texts"))
    desk = Desk(tmp_path, json.loads(text))
    desk.type("make train")
    desk.type(next(command for command in pages.commands(page) if "export" in command))
    code = pages.blocks(page, "python")[0]
    names: dict[str, Any] = {}
    exec(code.replace('"model"', repr(str(tmp_path / "model"))), names)
    assert isinstance(names["model"], Qwen3ForCausalLM)
    desk.type("make eval")


def test_a_reader_can_look_after_runs(tmp_path: Path) -> None:
    desk = Desk(tmp_path, {"name": "one", "data": DATA, "model": TINY})
    verbs.enter(tmp_path, "train")
    verbs.enter(tmp_path, "train", "SET=name=another train.learning_rate=1e-3")
    said = desk.follow("docs/how-to/runs.md")
    assert "another" in said["make runs"] and not (tmp_path / "runs/one/results.json").exists()


def test_a_reader_can_break_a_run(tmp_path: Path) -> None:
    desk = Desk(tmp_path, {"name": "one", "fleet": {"nodes": 2}, "data": DATA, "model": TINY})
    desk.follow("docs/how-to/faults.md")


def write_records(folder: Path) -> None:
    """Records as JSON lines and as Parquet, for the patterns that the page names."""
    texts = [f"Record {number} says what its number is." for number in range(40)]
    (folder / "records.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "data.parquet")


def make_qwen3(folder: Path, texts: Path) -> None:
    """A small Qwen 3 with random weights and a tokenizer of these texts, as its library saves them."""
    torch.manual_seed(0)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        ByteLevel(add_prefix_space=False),
        ByteLevelDecoder(),
    )
    trainer = BpeTrainer(
        vocab_size=340, special_tokens=["<|endoftext|>"], initial_alphabet=ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator((path.read_text() for path in sorted(texts.iterdir())), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(
        folder
    )
    shape = Qwen3Config(vocab_size=340, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                        num_key_value_heads=1, head_dim=16, eos_token_id=0, tie_word_embeddings=True)  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(folder)
