"""Conversations become tokens of which the assistant's are learned, in whole rows; hostile templates and records are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chats
from trainfleet.data import chat
from trainfleet.data.chat import MARKS, ChatTemplate
from trainfleet.data.dataset import Conversations, Dataset
from trainfleet.data.inspect import _told_apart
from trainfleet.data.packing import IGNORED, pack
from trainfleet.data.tokenizer import load
from trainfleet.trust.errors import DataError

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Bye?"}, {"role": "assistant", "content": "Bye!"}]  # fmt: skip
HEADER = "'<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n'"
# What the published templates do to roles, turns' ends and earlier thoughts, each in a line or two
FAMILIES = {
    "chatml": (chats.CHATML, ["Hello<|im_end|>", "Bye!<|im_end|>"]),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}{{ " + HEADER + " + message.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
        ["Hello<|eot_id|>", "Bye!<|eot_id|>"],
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if message.role == 'user' %}"
        "{{ '[INST] ' + message.content + ' [/INST]' }}{% else %}{{ ' ' + message.content + '</s>' }}{% endif %}{% endfor %}",
        [" Hello</s>", " Bye!</s>"],
    ),
    "gemma": (
        "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else message.role %}"
        "{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
        ["Hello<end_of_turn>", "Bye!<end_of_turn>"],
    ),
    "phi3": (
        "{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}",
        ["Bye!<|end|>\n<|endoftext|>"],
    ),
    "qwen3": (  # earlier answers lose their thoughts
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' and loop.last %}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ message.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        ["<think>\n\n</think>\n\nBye!<|im_end|>"],
    ),
    "tagged": (chats.TAGGED, ["Hello<|im_end|>", "Bye!<|im_end|>"]),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_assistant_says_is_learned_with_the_end_of_its_turn(family: str) -> None:
    source, learned = FAMILIES[family]
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "<|endoftext|>"}, "here")
    text = template.marked(MESSAGES)
    assert MARKS.split(text)[1::2] == learned
    assert template.rewrites == (len(learned) == 1)
    if family != "tagged":
        assert "".join(MARKS.split(text)) == template.render(MESSAGES)


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Conversations:
    monkeypatch.chdir(tmp_path)
    source = chats.write(tmp_path / "a.jsonl", [chats.record(n) for n in range(60)])
    data = chats.data_of(source, chats.folder(tmp_path / "model"))
    made = chats.tokenized(data)
    assert made.settings.conversations and made.documents == 60 and made.dtype == "int32"
    found = Dataset.open(Path("data/chat"), data)
    assert isinstance(found, Conversations)
    return found


def test_rows_are_whole_conversations_with_their_learned_targets(dataset: Conversations) -> None:
    length, template = 128, ChatTemplate.read(dataset.folder)
    count, tokenizer = dataset.samples("train", length), load(dataset.folder).reference.tokenizer
    rows = dataset.batch("train", 0, count, length, 3)
    seen = []
    for row in rows:
        for number in range(row[:, 2].max() + 1):
            own = row[row[:, 2] == number]
            text = tokenizer.decode(own[:, 0].tolist(), skip_special_tokens=False)
            learned = [int(token) for token in own[:, 1] if token != IGNORED]
            parts = text.replace("<|im_start|>", "<|im_end|>\n").split("<|im_end|>\n")[1:]
            answers = [
                part.removeprefix("assistant\n") for part in parts if part.startswith("assistant\n")
            ]
            assert tokenizer.decode(learned, skip_special_tokens=False) == "".join(
                f"{answer}<|im_end|>" for answer in answers
            )
            seen.append(text)
    wanted = [template.render(chat.messages_of(chats.record(n), "")) for n in range(60)]
    assert set(seen) <= set(wanted) and len(seen) == len(set(seen)) > 40
    counted = sum((row[:, 1] != IGNORED).sum() for row in rows[5:9])
    assert dataset.learned("train", 5, 4, length, 3) == counted > 0
    shown = "".join(_told_apart(load(dataset.folder), row) for row in rows)
    assert "assistant\n⟦" in shown and shown.count("⟧\n") == shown.count("⟦") == shown.count(
        "assistant\n"
    )
    # the order is that of Dataset: a function of the seed and the number, the same in any split of calls
    again = np.concatenate([dataset.batch("train", at, 1, length, 3) for at in range(count)])
    assert np.array_equal(again, rows) and not np.array_equal(
        dataset.batch("train", 0, count, length, 4), rows
    )


def test_rows_are_filled_well_and_long_conversations_are_left_out_and_told(
    dataset: Conversations,
) -> None:
    lengths = np.random.default_rng(0).integers(2, 1000, 5000)
    packed = pack(lengths * 0, lengths, np.ones(5000, np.int64), 512)
    sizes = np.add.reduceat(lengths[packed.order] - 1, packed.bounds[:-1])
    assert sizes.max() <= 512 and sizes.mean() > 500
    assert sorted(packed.order) == np.flatnonzero(lengths <= 513).tolist()
    assert packed.learned.sum() == len(packed.order)
    with pytest.raises(DataError, match="without a conversation of 8 tokens"):
        dataset.samples("train", 8)


def test_a_long_conversation_is_cut_after_its_last_answer_that_fits(dataset: Conversations) -> None:
    length, template = 64, ChatTemplate.read(dataset.folder)
    tokenizer, packs = load(dataset.folder).reference.tokenizer, dataset.packs("train", 64)
    every = [template.render(chat.messages_of(chats.record(n), "")) for n in range(60)]
    rows = dataset.batch("train", 0, count := dataset.samples("train", length), length, 3)
    cut = 0
    for row in rows:
        for number in range(row[:, 2].max() + 1):
            own = row[row[:, 2] == number]
            ids = [*own[:, 0].tolist(), own[-1, 1] if own[-1, 1] != IGNORED else 0]
            text = tokenizer.decode(ids, skip_special_tokens=False).removesuffix("<|endoftext|>")
            (whole,) = (each for each in every if each.startswith(text))
            cut += text != whole
            if text != whole:
                assert text.endswith("<|im_end|>") and "<|im_start|>assistant" in text
                rest = whole[: whole.index("<|im_end|>", whole.index("assistant\n", len(text)))]
                assert len(tokenizer.encode(rest, add_special_tokens=False).ids) + 1 > length + 1
    assert cut == packs[0].cut > 0
    learned = sum(int((row[:, 1] != IGNORED).sum()) for row in rows)
    assert dataset.learned("train", 0, count, length, 3) == learned
    told = dataset.notes(64)[-1]
    assert told.startswith(
        f"{cut + dataset.packs('validation', 64)[0].cut:,} conversations are longer than 64"
    )
    assert f"{dataset.packs('validation', 64)[0].cut + cut:,} are cut after the last answer" in told


BAD = {
    "two systems": ({"messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, *MESSAGES]}, "message 2 is a system message"),
    "empty answer": ({"messages": [MESSAGES[0], {"role": "assistant", "content": " "}]}, "message 2 is an empty answer"),
    "no answer": ({"messages": MESSAGES[:1]}, "has no message of the assistant"),
    "unknown role": ({"messages": [{"role": "critic", "content": "a"}, *MESSAGES]}, "roles must be user or assistant"),
    "no list": ({"messages": "Hi"}, "not a list of messages"),
    "no text": ({"messages": [{"role": "user", "content": ["a"]}, MESSAGES[1]]}, "message 1 must have a role and a text"),
    "half a pair": ({"prompt": "a", "completion": "\ud800"}, "surrogate"),
    "another form": ({"conversations": [{"from": "human", "value": "a"}]}, "lacks the field"),
}  # fmt: skip
STRICT = chats.CHATML.replace(
    "{{'<|im", "{% if message.role not in ('user', 'assistant', 'system') %}"
    "{{ raise_exception('roles must be user or assistant') }}{% endif %}{{'<|im", 1
)  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_record_is_named_with_its_line_or_skipped_and_counted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record, said = BAD[kind]
    source = chats.write(
        tmp_path / "a.jsonl", [chats.record(0), record, *map(chats.record, range(1, 20))]
    )
    model = chats.folder(tmp_path / "model", STRICT)
    with pytest.raises(DataError) as caught:
        chats.tokenized(chats.data_of(source, model))
    assert f"{source}:2" in str(caught.value) and said in str(caught.value)
    made = chats.tokenized(chats.data_of(source, model, on_bad_record=0.1))
    assert made.skipped == 1 and f"{source}:2" in made.skipped_records[0] and made.documents == 20


HOSTILE = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
    "reaches": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "changes": ("{{ messages.clear() }}", "SecurityError"),
    "eats": ("{{ 'a' * 99999999999999 }}", "MemoryError"),
    "grows": ("{{ 'a' * 9999999 }}", "more than 4,194,304 characters"),
    "nests": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "RecursionError"),
    "broken": ("{% for a in %}", "TemplateSyntaxError"),
    "stops nowhere": ("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}", "without a special token"),
    "missing": (None, "has no chat template"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_is_refused_before_any_record(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if kind == "loops":
        monkeypatch.setattr(chat, "SECONDS", 0.5)
    template, said = HOSTILE[kind]
    source = chats.write(tmp_path / "a.jsonl", [chats.record(n) for n in range(20)])
    data = chats.data_of(source, chats.folder(tmp_path / "model", template), on_bad_record="skip")
    with pytest.raises(DataError) as caught:
        chats.tokenized(data)
    assert said in str(caught.value)


def test_a_template_that_waits_for_a_record_to_loop_ends_the_job_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chat, "SECONDS", 0.5)
    template = (
        "{% if 'how' in messages[0].content %}" + HOSTILE["loops"][0] + "{% endif %}" + chats.CHATML  # type: ignore[operator]
    )
    records = [{"messages": MESSAGES}, {"prompt": "how", "completion": "so"}]
    data = chats.data_of(
        chats.write(tmp_path / "a.jsonl", records), chats.folder(tmp_path / "model", template), on_bad_record=0.5
    )  # fmt: skip
    with pytest.raises(DataError, match=r"(?s)a\.jsonl:2.*TimeoutError"):
        chats.tokenized(data)


def test_each_format_of_records_makes_the_same_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow
    from pyarrow import feather, parquet

    monkeypatch.chdir(tmp_path)
    model, records = (
        chats.folder(tmp_path / "model"),
        [{"messages": chat.messages_of(chats.record(n), "")} for n in range(20)],
    )
    table = pyarrow.Table.from_pylist(records)
    parquet.write_table(table, "a.parquet")
    feather.write_feather(table, "a.arrow", compression="uncompressed")
    chats.write(tmp_path / "a.jsonl", records)
    Path("a.json").write_text(json.dumps(records))
    made: list[Any] = []
    for name in ("a.jsonl", "a.json", "a.parquet", "a.arrow"):
        data = chats.data_of(Path(name), model)
        made.append(chats.tokenized(type(data)(**{**vars(data), "name": f"d-{name[2:]}"})))
    assert len({each.identity for each in made}) == 1
    pairs = [dict(zip(("prompt", "completion"), chats.turns(n), strict=True)) for n in range(20)]
    chats.write(tmp_path / "b.jsonl", pairs)
    Path("b.csv").write_text(
        "prompt,completion\n" + "".join(f'"{p["prompt"]}","{p["completion"]}"\n' for p in pairs)
    )
    for name in ("b.jsonl", "b.csv"):
        data = chats.data_of(Path(name), model)
        made.append(chats.tokenized(type(data)(**{**vars(data), "name": f"d-{name}"})))
    assert made[-1].identity == made[-2].identity != made[0].identity
