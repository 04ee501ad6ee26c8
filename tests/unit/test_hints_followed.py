"""What a message proposes is typed, and then the same complaint does not come again: over all bad inputs that we know."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import chats
from foreign.configs import CONTRADICTIONS
from trainfleet.backends import terms_of
from trainfleet.cli import main
from trainfleet.cli.variables import read_variables
from trainfleet.config import Settings, load
from trainfleet.config.types import Data
from trainfleet.data.tokenize_worker import Share, tokenize
from trainfleet.trust.errors import ConfigError, DataError, Problem

GOOD = "name: a\ndata: {sources: [stdlib]}\n"
SLIPS = [  # what newcomers write, and which value they mean
    "train: {steps: 10k}", "train: {steps: '1,300'}", "train: {steps: 2.5k}", "train: {sequence_length: 4k}", "train: {global_batch_size: '64'}",
    "data: {vocab_size: 32k}", "budget: {max_usd: $500}", "train: {compile: yes}", "checkpoint: {export_hf: on}", "fleet: {nodes: two}",
    "train: {optimizer: adam}", "train: {optimizer: adamW}", "train: {schedule: cosin}", "model: {preset: llama-1b}",
    "model: {preset: Llama-3-8B}", "model: {preset: llama3-8b}", "model: {preset: qwen-7b}", "model: {preset: gpt-2}", "train: {lr: 1e-3}",
    "train: {learning-rate: 1e-3}", "train: {batch_size: 8}", "train: {seqlen: 128}", "data: {sources: text}", "trian: {steps: 5}",
    "steps: 5", "train: {warmup: 10}", "checkpoint: {save_every: 100}", "train: {precision: fp23}", "data: {on_bad_record: skipp}",
]  # fmt: skip
MEANT = {  # of some of them: what is proposed, to the letter, in place of the one problem that is told
    "train: {steps: 10k}": "train.steps=10000", "train: {sequence_length: 4k}": "train.sequence_length=4096",
    "data: {vocab_size: 32k}": "data.vocab_size=32768", "budget: {max_usd: $500}": "budget.max_usd=500",
    "train: {optimizer: adam}": "train.optimizer=adamw", "model: {preset: llama-1b}": "model.preset=llama-3.2-1b",
    "model: {preset: llama3-8b}": "model.preset=llama-3-8b", "model: {preset: gpt-2}": "model.preset=gpt2",
}  # fmt: skip
NUMBERS = r"(-?[0-9][\w.]*)"
FORMS = (  # how a message proposes a value of the key that it is about
    r"did you mean (\[.*\]|[^\s?,]+)(?:, without[^?]*)?\?$",
    r"(?:;|, so|:| or) ([\w.\[\]/:-]+)(?:,)? (?:is what )?works(?:, or [^;]*)?$",
    r"(?:;|, so|:) (?:set|use) ([\w.\[\]/:-]+)(?: or more|,? or [^;]*|, with [^;]*|, as auto does| \([^)]*\))?$",
    rf"valid (?:values|products|sizes): {NUMBERS}",
    rf"use at most {NUMBERS}",
    r"another preset: ([\w.-]+)",
)


def problems(text: str, set: str = "", **short: tuple[str, str]) -> list[Problem]:
    Path("config.yaml").write_text(text)
    try:
        load(Settings(Path("config.yaml"), set, short), terms_of)
    except ConfigError as error:
        return error.problems
    return []


def proposals(problem: Problem) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """SET, and the variables, that a message proposes; of a key that is unknown: its right name."""
    if match := re.search(r"set NODES=([0-9]+)(?:$|, or )|NODES=([0-9]+) works", problem.message):
        yield "", {"NODES": ("fleet.nodes", match[1] or match[2])}
    if match := re.search(r"SET='([^']*)'", problem.message):
        yield match[1], {}
    if not problem.message.startswith("unknown key"):
        for form in FORMS:
            if match := re.search(form, problem.message):
                key = "model.preset" if "another preset" in form else problem.key
                yield (
                    (
                        f"data.sources=[{match[1]!r}]"
                        if "data.sources[" in key
                        else f"{key}={match[1]}"
                    ),
                    {},
                )


def renamed(text: str, problem: Problem) -> str | None:
    """The text with the key that a message proposes in place of an unknown one; None where it proposes none."""
    match = re.match(r"unknown key; did you mean ([\w.]+)\?", problem.message)
    if not match:
        return None
    *groups, old = problem.key.split(".")
    new = match[1] if "." in match[1] or not groups else f"{'.'.join(groups)}.{match[1]}"
    value = re.search(rf"(?<![\w.-]){re.escape(old)}: *([^,}}\n]*)", text)
    assert value, (text, old)
    left = re.sub(rf",? *(?<![\w.-]){re.escape(old)}: *[^,}}\n]*", "", text)
    left = re.sub(r"^\w+: *\{\}\n", "", left, flags=re.MULTILINE)
    if isinstance(inner := value[1], str) and inner.startswith("{"):
        return re.sub(rf"(?<![\w.-]){re.escape(old)}:", f"{new}:", text)
    key = f"{new}={inner}"
    return f"{left}\0{key}"


PLAIN = (
    "fleet.hosts",
    "fleet.ssh",
    "fleet.secrets",
    "fleet.shared_folder",
    "fleet.fsx",
    "data.tokenized_path",
)  # whose messages propose nothing
TEXTS = [*SLIPS, *(text for text, key in CONTRADICTIONS if not key.startswith(PLAIN))]


def rows() -> list[tuple[str, str]]:
    """Each bad config with what is proposed for one of its problems."""
    found = []
    for text in TEXTS:
        whole = f"{GOOD}{text}\n" if not text.startswith("data:") else f"name: a\n{text}\n"
        found.append((text[:80], whole))
    return found


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_value_and_key_that_a_message_proposes_is_taken() -> None:
    """Of all bad configs; those with a proposal are counted, so that none is passed over in silence."""
    followed, ignored, unread = 0, list[str](), list[str]()
    for label, text in rows():
        for problem in problems(text):
            known = [(problem.key, problem.message)]
            tries = [problems(text, set, **short) for set, short in proposals(problem)]
            if (other := renamed(text, problem)) is not None:
                left, _, key = other.partition("\0")
                tries.append(problems(left, key))
            followed += len(tries)
            again = [
                found for found in tries if known[0] in {(one.key, one.message) for one in found}
            ]
            ignored += [f"{label}: {problem}" for _ in again]
            if re.search(
                "did you mean| works|valid [a-z]+:|; use at most|; (?:set|use) \\S+$",
                problem.message,
            ):
                unread += [str(problem)] * (not tries)
    assert not ignored, "\n".join(ignored)
    assert not unread, "\n".join(["nothing was found to type in:", *unread])
    assert followed >= 45, followed


@pytest.mark.parametrize(("text", "meant"), MEANT.items())
def test_what_a_newcomer_meant_is_proposed_and_nothing_else_is_told(text: str, meant: str) -> None:
    (problem,) = problems(
        f"{GOOD}{text}\n" if not text.startswith("data:") else f"name: a\n{text}\n"
    )
    assert list(proposals(problem)) == [(meant, {})]


@pytest.mark.parametrize(
    "words, key", [(["STEPS=5"], "train.steps"), (["--steps", "5"], "train.steps"), (["train.steps=5"], "train.steps"),
                   (["seed=3"], "train.seed"), (["--learning-rate", "1e-4"], "train.learning_rate"), (["TENSOR=2"], "train.parallelism.tensor"),
                   (["SET=train.steps = 5"], "train.steps"), (["SET=train.steps =5 train.seed= 3"], "train.seed")],
)  # fmt: skip
def test_a_key_typed_as_a_variable_is_told_as_set(
    words: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("config.yaml").write_text(GOOD)
    assert main(["plan", *words]) == 2
    said = capsys.readouterr().err
    proposed = re.search(r"SET=('[^']*')", said)
    assert proposed and key in proposed[1], said
    variables = read_variables("plan", ("SET",), [f"SET={shlex.split(proposed[1])[0]}"], {})
    assert problems(GOOD, variables["SET"]) == [], "what was proposed is refused"


BODY = [
    {"id": number, "body": f"a body of words {number} " * 9, "meta": {"a": 1}}
    for number in range(60)
]
CHAT = [
    {
        "messages": [
            {"role": "user", "content": f"what is {n}?"},
            {"role": "assistant", "content": f"{n} it is " * 9},
        ]
    }
    for n in range(60)
]
SHARE = [
    {
        "conversations": [
            {"from": "human", "value": f"what is {n}?"},
            {"from": "gpt", "value": f"{n} it is " * 9},
        ]
    }
    for n in range(60)
]
PAIRS = [{"prompt": f"what is {n}?", "completion": f"{n} it is, says he " * 9} for n in range(60)]
RECORDS = {"another field": BODY, "chat": CHAT, "sharegpt": SHARE, "pairs": PAIRS,
           "instructions": [{"instruction": f"say {n}", "input": "", "output": f"{n} and so on " * 9} for n in range(60)]}  # fmt: skip
WRITTEN = {
    "a.jsonl": lambda records: "".join(json.dumps(record) + "\n" for record in records),
    "a file.jsonl": lambda records: "".join(json.dumps(record) + "\n" for record in records),
    "a.json": json.dumps,
}


@pytest.mark.parametrize("field", ["text", "messages", "id"])
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("kind", RECORDS)
def test_each_hint_about_records_ends_in_a_dataset(
    kind: str, name: str, field: str, desk: Path
) -> None:
    """Another field, or a command that flattens what is said: typed by a real shell, with a real jq."""
    Path(name).write_text(WRITTEN[name](RECORDS[kind]))
    data = Data("set", (name,), field, "bpe", 300, 0.1)
    with pytest.raises(DataError) as caught:
        tokenize(data, Share(0, 1, 1))
    hint = caught.value.next
    if kind == "another field":
        assert hint == "add SET='data.text_field=body'"
        data = Data("set", (name,), "body", "bpe", 300, 0.1)
    else:
        assert "train on conversations: " in hint and "text_field=" not in hint, hint
        ends = r"(?:with jq installed, run (.*); then )?add SET='(?:data\.sources=\[chat\.jsonl\] )?data\.conversations=true'$"
        command = re.search(ends, hint)
        assert command, hint
        if command[1]:
            subprocess.run(command[1], shell=True, check=True)
        made = Path("chat.jsonl" if command[1] else name)
        data = replace(chats.data_of(made, chats.folder(desk / "model")), name="set")
    finished = tokenize(data, Share(0, 1, 1))
    assert finished is not None and finished.documents == 60
    if Path("chat.jsonl").exists():
        text = Path("chat.jsonl").read_text().splitlines()[7]
        said = re.findall(r'"((?:what|say|7)[^"]*)"', json.dumps(RECORDS[kind][7]))
        assert all(part in text for part in said) and said


MAGIC = {"png": b"\x89PNG\r\n\x1a\n" + b"\x00\x01\xff" * 99, "jpeg": b"\xff\xd8\xff\xe0" + b"abc" * 99, "zip": b"PK\x03\x04" + b"\xfe" * 99,
         "pdf": b"%PDF-1.7\n\xe2\xe3\xcf\xd3", "parquet": b"PAR1" + b"\xff" * 99, "sqlite": b"SQLite format 3\x00" + b"\xff\x00" * 99,
         "elf": b"\x7fELF" + bytes(99), "film": b"\0\0\0\x18ftypmp42" + b"\xff" * 99, "pickle": b"\x80\x04\x95" + b"\xff" * 99}  # fmt: skip


@pytest.mark.parametrize("kind", MAGIC)
def test_what_is_no_text_at_all_is_named_and_not_converted(kind: str) -> None:
    """iconv would make text of it, and the model learn noise."""
    Path("a.txt").write_bytes(MAGIC[kind])
    with pytest.raises(DataError) as caught:
        tokenize(Data("set", ("a.txt",), "text", "bpe", 300, 0.1), Share(0, 1, 1))
    assert "exclude it: it is a" in caught.value.next and "iconv" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["latin1", "utf-16", "utf-32"])
def test_a_text_in_another_encoding_is_converted_by_the_command_that_is_proposed(
    encoding: str,
) -> None:
    text = "Größe und Länge, ça va, mañana.\n" * 400
    Path("a.txt").write_bytes(text.encode(encoding))
    with pytest.raises(DataError) as caught:
        tokenize(Data("set", ("a.txt",), "text", "bpe", 270, 0.1), Share(0, 1, 1))
    command = re.search(r"convert it \((iconv [^)]*)\)", caught.value.next)
    assert command, caught.value.next
    subprocess.run(f"{command[1]} a.txt > b.txt", shell=True, check=True)
    assert Path("b.txt").read_text().removeprefix("\ufeff") == text
