"""What another machine sends to be carried out, and the files that come back, are believed only where they can be true."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainfleet.config import Settings, load
from trainfleet.hosts import head
from trainfleet.hosts.host_results import Implausible
from trainfleet.hosts.mirror import read_sizes
from trainfleet.hosts.tar import OUTPUT_BEGINS, _after_mark, said
from trainfleet.trust.errors import InputError
from unit.test_mirror_lies import listed

CONFIG = Path(__file__).parents[2] / "config.yaml"


def sent(data: bytes) -> list[str]:
    read, write = os.pipe()
    os.write(write, data)
    return head.received_verb(read)


def test_an_order_is_the_words_of_a_verb_and_shows_nothing_in_a_process_list() -> None:
    config = load(Settings(CONFIG))[0]
    line = head.encode_verb(
        "sample", config, {"PROMPT": "a 'b'\n$(c)", "SET": "train.steps=5", "CONFIG": "mine.yaml"}
    )
    assert line.count(b"\n") == 1
    verb, config_word, prompt = sent(line)
    assert (verb, prompt) == ("sample", "PROMPT=a 'b'\n$(c)")
    assert f"name: {config.name}" in Path(config_word.removeprefix("CONFIG=")).read_text()
    assert "sample" not in head.verb_command("/usr/bin/python3", "/fsx/code", "/fsx")


@pytest.mark.parametrize("line", [b"\n", b"[]\n", b'{"verb": 1, "config": "", "variables": {}}\n',
                                  b'{"verb": "sample", "config": "", "variables": {"PROMPT": 1}}\n', b"\xff\xfe\n"])  # fmt: skip
def test_what_is_no_order_is_refused(line: bytes) -> None:
    with pytest.raises(InputError):
        sent(line)


def test_a_list_of_files_names_plain_files_only() -> None:
    assert read_sizes(listed({"model.safetensors": 0, "config.json": 12})) == {
        "config.json": 12,
        "model.safetensors": 0,
    }
    deep = {"done": 1, "weights/model/dp_rank_00.pt": 9}
    assert read_sizes(listed(deep)) == deep
    for sizes in (
        *({name: 1} for name in ("../x", "a/../b", "/a", "a/.b", "a/b/c/d", ".bashrc", "", "a\nb")),
        {"x": -1},
        {"a": 10**15, "b": 10**15},
    ):
        with pytest.raises(Implausible):
            read_sizes(listed(sizes))
    with pytest.raises(Implausible):
        read_sizes(json.dumps({"a": 1}))


def test_a_greeting_is_no_part_of_an_answer_wherever_the_bytes_are_cut() -> None:
    whole = b"Welcome\n" + OUTPUT_BEGINS + b"yes\n" + OUTPUT_BEGINS
    assert said(whole) == b"yes\n" + OUTPUT_BEGINS and said(b"no mark") == b"no mark"
    for cut in range(len(whole)):
        found: list[bytes] = []
        take = _after_mark(found.append)
        take(whole[:cut])
        take(whole[cut:])
        assert b"".join(found) == b"yes\n" + OUTPUT_BEGINS
