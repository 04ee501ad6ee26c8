"""The special tokens of a tokenizer's folder beside transformers' AutoTokenizer, which reads the same files.

Folders are made here in the forms that the families' own have; published_tokenizers.yaml has the small files of ten public models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from requirement import need
from trainfleet.config.vocabulary import Vocabulary, named_tokens

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
LETTERS = [chr(code) for code in range(97, 123)]
Files = dict[str, Any]
PUBLISHED: dict[str, Files] = yaml.safe_load(
    Path(__file__).with_name("published_tokenizers.yaml").read_text()
)


def described(token: str) -> dict[str, Any]:
    """A token as older files have it, at length."""
    return {
        "content": token,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
    }


def listed(**tokens: int) -> dict[str, Any]:
    return {str(id_): described(token) | {"special": True} for token, id_ in tokens.items()}


LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BERT = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")}
ROBERTA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>",
           "cls_token": "<s>", "mask_token": "<mask>"}  # fmt: skip
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# family → the special tokens of its tokenizer.json, and its other files
FAMILIES: dict[str, tuple[list[str], Files]] = {
    "llama-2": (["<unk>", "<s>", "</s>"], {"tokenizer_config": FAST | {
        key: {"__type": "AddedToken"} | described(token) for key, token in LLAMA.items()}}),
    "llama-2-map": (["<unk>", "<s>", "</s>"], {"tokenizer_config": FAST, "special_tokens_map": LLAMA}),
    "llama-3": (["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
                {"tokenizer_config": FAST | {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
                                             "added_tokens_decoder": listed(**{"<|begin_of_text|>": 26, "<|eot_id|>": 28})},
                 "special_tokens_map": {"eos_token": "<|end_of_text|>"}}),
    "qwen": (CHAT, {"tokenizer_config": FAST | {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}}),
    "qwen-map-wins": (CHAT, {"tokenizer_config": FAST | {"eos_token": "<|im_end|>"},
                             "special_tokens_map": {"eos_token": described("<|endoftext|>"), "pad_token": "<|im_end|>"}}),
    "qwen-null": (CHAT, {"tokenizer_config": FAST | {"bos_token": None, "eos_token": "<|im_end|>"}}),
    "gpt-neox": (["<|endoftext|>"], {"tokenizer_config": FAST, "special_tokens_map": dict.fromkeys(
        ("bos_token", "eos_token", "unk_token"), "<|endoftext|>")}),
    "gemma": (["<pad>", "<eos>", "<bos>", "<unk>"], {"tokenizer_config": FAST | {
        "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}}),
    "bert": ([*BERT.values()], {"tokenizer_config": FAST, "special_tokens_map": BERT}),
    "roberta": ([*dict.fromkeys(ROBERTA.values())], {"special_tokens_map": ROBERTA, "tokenizer_config": FAST}),
    "t5": (["<pad>", "</s>", "<unk>"], {"tokenizer_config": FAST, "special_tokens_map": {
        "eos_token": described("</s>"), "pad_token": described("<pad>"), "unk_token": "<unk>"}}),
    "added-later": (["<|endoftext|>"], {"tokenizer_config": FAST | {"eos_token": "<|im_end|>"},
                                        "added_tokens": {"<|im_end|>": 28, "<|im_start|>": 27}}),
    "added-listed": (["<|endoftext|>"], {"tokenizer_config": FAST | {
        "eos_token": "<|end|>", "added_tokens_decoder": listed(**{"<|endoftext|>": 26, "<|end|>": 27})},
        "added_tokens": {"<|never|>": 28}, "special_tokens_map": {"eos_token": "<|endoftext|>"}}),
}  # fmt: skip


@pytest.mark.parametrize("special, files", FAMILIES.values(), ids=FAMILIES)
def test_roles_and_ids_are_those_of_transformers(
    tmp_path: Path, special: list[str], files: Files
) -> None:
    transformers, tokenizers = need("transformers"), need("tokenizers")
    built = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: id_ for id_, letter in enumerate(LETTERS)}, [])
    )
    built.add_special_tokens(special)
    built.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    judge, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Vocabulary.read(tmp_path)
    roles = named_tokens(tmp_path)[0]
    for role in ROLES:
        assert ours.vocabulary.get(roles.get(f"{role}_token", "")) == getattr(
            judge, f"{role}_token_id"
        ), role
    assert ours.vocabulary_size == len(judge)
    if judge.eos_token_id is not None:
        assert ours.end_of_document == judge.eos_token_id


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_public_model_s_special_tokens_are_those_of_transformers(
    tmp_path: Path, name: str
) -> None:
    transformers, models = need("transformers"), need("tokenizers").models
    files = dict(PUBLISHED[name])
    assert files.pop("licence")
    ids = files.pop("ids")
    size = min(files.get("added_tokens", {"": max(ids.values()) + 1}).values())
    vocabulary = {f"word{number}": number for number in {*range(size)} - {*ids.values()}} | ids
    words = models.WordPiece(vocabulary, unk_token="[UNK]")
    built = need("tokenizers").Tokenizer(words if "[UNK]" in ids else models.BPE(vocabulary, []))
    built.add_special_tokens([*ids])
    built.save(str(tmp_path / "tokenizer.json"))
    for file, content in files.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    judge, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Vocabulary.read(tmp_path)
    for role, token in named_tokens(tmp_path)[0].items():
        if role.removesuffix("_token") in ROLES:
            assert ours.vocabulary[token] == getattr(judge, f"{role}_id"), role
    end = judge.sep_token_id if judge.eos_token_id is None else judge.eos_token_id
    assert ours.end_of_document == end


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("sp_model_kwargs", {}), ("image_token", {"a": 1}), ("extra_special_tokens", [{"b": 2}]), ("auto_map", {"c": [None]}),
     ("chat_template", [{"name": "default", "template": "x"}]), ("model_max_length", 1e30)],
)  # fmt: skip
def test_a_key_that_is_none_of_a_role_may_have_any_value(
    tmp_path: Path, file: str, key: str, value: object
) -> None:
    (tmp_path / f"{file}.json").write_text(json.dumps({key: value, "eos_token": "</s>"}))
    assert named_tokens(tmp_path)[0]["eos_token"] == "</s>"
    (tmp_path / "special_tokens_map.json").write_text('{"added_tokens_decoder": {"x": {"content": "y"}}}')  # fmt: skip
    assert "added_tokens_decoder" not in named_tokens(tmp_path)[0]


def test_tokens_beside_vocab_json_and_merges_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = need("transformers")
    vocabulary = {letter: id_ for id_, letter in enumerate([*LETTERS, "ab", "<|endoftext|>"])}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    contents = {
        "vocab": vocabulary,
        "added_tokens": {"<|im_end|>": 29, "<|im_start|>": 28},
        "tokenizer_config": config,
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    judge, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), Vocabulary.read(tmp_path)
    assert (
        ours.end_of_document == judge.eos_token_id == 29 and ours.vocabulary["<|im_start|>"] == 28
    )
