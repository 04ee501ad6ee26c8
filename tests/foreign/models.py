"""Bad model folders and tokenizers: Hugging Face's files, SentencePiece models and word lists that are not what they say."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from trainfleet.config import Settings
from trainfleet.config.types import Data
from trainfleet.data.tokenizer import load as load_tokenizer
from trainfleet.data.tokenizer import require_use
from trainfleet.launch.command import config_of

from . import folders
from .cases import Case
from .commands import SPECIAL

LLAMA = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
         "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}  # fmt: skip
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.1,
    "activation_function": "gelu_new",
}
BERT = {"model_type": "bert", "vocab_size": 30522, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 512, "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.1, "hidden_act": "gelu", "type_vocab_size": 2}  # fmt: skip
ROBERTA = BERT | {
    "model_type": "roberta",
    "type_vocab_size": 1,
    "max_position_embeddings": 514,
    "pad_token_id": 1,
}
SHAPES = (LLAMA, GPT2, BERT, ROBERTA)
TOKENIZER = {"version": "1.0", "added_tokens": [{"id": 300, "content": "<|endoftext|>", "special": True}],
             "model": {"type": "BPE", "vocab": {chr(0x4e00 + i): i for i in range(300)}, "merges": []}}  # fmt: skip
UNIGRAM = {
    "version": "1.0",
    "added_tokens": [],
    "model": {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [["<unk>", 0.0], ["</s>", -1.0], *[[f"t{i}", -2.0 - i] for i in range(300)]],
    },
}
WRONG: tuple[Any, ...] = (
    None,
    True,
    "x",
    "",
    -1,
    0,
    1.5,
    2**31,
    2**70,
    1e300,
    [],
    {},
    [1],
    {"a": 1},
    "64",
    [[]],
    "\ud800",
)
RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "9" * 5000,
    "nul",
    "'x'",
    "01",
    "+1",
    "0x10",
    "[" * 3000 + "]" * 3000,
    '"\\ud800"',
    '{"a": 1, "a": 2}',
)


def folder_of(**files: str | bytes) -> Callable[[Path], Path]:
    """A folder with these files; `_` in a name stands for a dot."""

    def make(folder: Path) -> Path:
        where = folder / "folder"
        where.mkdir()
        for name, content in files.items():
            (where / name.replace("__", ".")).write_bytes(
                content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
            )
        return where

    return make


def _with(key: str, make: Callable[[Path], Path]) -> Callable[[Path], object]:
    def run(folder: Path) -> object:
        path = json.dumps(str(make(folder)), ensure_ascii=False).replace("\0", "\\0")
        section, name = key.split(".")
        rest = "  vocab_size: 2000000\n" if key == "data.tokenizer" else ""
        text = f"name: a\n{section}:\n  {name}: {path}\n" + (
            "model: {vocab_size: 2000000}\n" if rest else "data: {vocab_size: 300}\n"
        )
        (folder / "config.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
        return config_of(Settings(folder / "config.yaml"))

    return run


def shapes() -> Iterator[Case]:
    """config.json with every key of every other type, out of range, missing, or no JSON at all."""

    def case(label: str, text: str | bytes, refused: bool = True) -> Case:
        return Case(
            "model",
            label,
            _with("model.preset", folder_of(config__json=text)),
            refused,
            key="model.preset",
        )

    for shape in SHAPES:
        kind = shape["model_type"]
        for key, good in shape.items():
            for value in WRONG:
                plausible = (
                    (isinstance(good, bool) and value in (True, 1))
                    or (type(value) is int and value > 8 and key != "hidden_size")
                    or value == good
                )
                plausible = (
                    plausible
                    or (
                        key.endswith(("pdrop", "dropout_prob"))
                        and type(value) is int
                        and value == 0
                    )
                    or (key == "rope_theta" and value == 1.5)
                )
                free = (
                    (value in (None, True) and key in ("tie_word_embeddings", "hidden_act"))
                    or (value is None and key in ("rope_theta", "num_key_value_heads"))
                    or plausible
                )
                yield case(
                    f"{kind} {key}: {value!r}"[:80], json.dumps(shape | {key: value}), not free
                )
            for value in RAW:
                yield case(
                    f"{kind} {key}: {value[:20]}",
                    json.dumps(shape | {key: "@"}).replace('"@"', value),
                )
            if key not in (
                "rope_theta",
                "tie_word_embeddings",
                "hidden_act",
                "activation_function",
                "num_key_value_heads",
                "rms_norm_eps",
                "type_vocab_size",
                "pad_token_id",
            ):
                yield case(
                    f"{kind} lacks {key}",
                    json.dumps({name: value for name, value in shape.items() if name != key}),
                )
    for key, value in (("rope_scaling", 3), ("rope_scaling", {"type": "yarn"}), ("rope_scaling", {"rope_type": "llama3"}), ("rope_scaling", {"rope_type": "llama3", "factor": "x"}), ("rope_parameters", [1]), ("rope_parameters", {"rope_theta": "x"}),
                       ("rope_parameters", {"rope_theta": []}), ("rope_parameters", {"rope_type": []}), ("head_dim", 7), ("head_dim", "x"), ("head_dim", []), ("head_dim", -16), ("mlp_bias", True), ("attention_bias", True), ("hidden_act", "relu")):  # fmt: skip
        yield case(f"{key}: {value}", json.dumps(LLAMA | {key: value}))
    good = json.dumps(LLAMA)
    for label, text in {"empty": "", "list": "[]", "word": "x", "null": "null", "text": '"x"', "cut": good[:-20], "twice": good[:-1] + ', "hidden_size": 32}', "more": good + "{}", "comment": good + "// x", "comma": good[:-1] + ",}", "single quotes": good.replace('"', "'"),
                        "large": good[:-1] + ', "x": "' + "x" * 3_000_000 + '"}', "deep": good[:-1] + ', "x": ' + "[" * 900 + "]" * 900 + "}"}.items():  # fmt: skip
        yield case(label, text)
    for encoding in ("utf-16", "utf-32", "latin-1"):
        yield case(encoding, good.replace("llama", "llamä").encode(encoding))
    for label, make in SPECIAL.items():
        if label not in ("empty", "nothing"):
            yield Case("model folder", label, _with("model.preset", make))
            yield Case(
                "model file",
                label,
                _with(
                    "model.preset", lambda folder, make=make: _named(folder, make, "config.json")
                ),
            )


def _named(folder: Path, make: Callable[[Path], Path], name: str) -> Path:
    """A folder in which a file of that name is a link to something else."""
    (folder / "folder").mkdir()
    target = make(folder)
    (folder / "folder" / name).symlink_to(str(target).replace("\0", "")[:4000])
    return folder / "folder"


def tokenizers() -> Iterator[Case]:
    """Tokenizers of every kind with every part of another kind."""

    def case(label: str, refused: bool = True, **files: str | bytes) -> Case:
        return Case(
            "tokenizer",
            label[:80],
            _with("data.tokenizer", folder_of(**files)),
            refused,
            key="data.tokenizer",
        )

    for name, good in (("bpe", TOKENIZER), ("unigram", UNIGRAM)):
        for path in (("model",), ("model", "vocab"), ("model", "type"), ("added_tokens",)):
            for value in WRONG:
                fine = (path, value) in (
                    (("added_tokens",), []),
                    (("model", "vocab"), {"a": 1}),
                ) and not (name == "unigram" and value)
                yield case(
                    f"{name} {path}: {value!r}",
                    not fine,
                    tokenizer__json=json.dumps(_put(good, path, value)),
                )
            for value in RAW:
                yield case(
                    f"{name} {path}: {value[:20]}",
                    tokenizer__json=json.dumps(_put(good, path, "@")).replace('"@"', value),
                )
    for value in (
        *[value for value in WRONG if value not in (0, True) or value is True],
        2_000_001,
        1.0,
    ):
        yield case(
            f"an id {value!r}",
            type(value) is not int or not 0 <= value < 2_000_000,
            tokenizer__json=json.dumps(_put(TOKENIZER, ("model", "vocab", "x"), value)),
        )
        yield case(
            f"an added token {value!r}",
            tokenizer__json=json.dumps(TOKENIZER | {"added_tokens": [value]}),
        )
        yield case(
            f"a pair {value!r}",
            tokenizer__json=json.dumps(_put(UNIGRAM, ("model", "vocab"), [value])),
        )
        yield case(
            f"eos_token {value!r}",
            not (value is None or value in ("x", "", "64")),
            tokenizer__json=json.dumps(TOKENIZER),
            tokenizer_config__json=json.dumps({"eos_token": value}),
        )
        yield (
            case(
                f"vocab.json {value!r}",
                vocab__json=json.dumps(value if not isinstance(value, dict) or value else [1]),
                merges__txt="",
            )
            if value != {"a": 1}
            else case("no merges", False, vocab__json='{"a": 1}', merges__txt="")
        )
    good = json.dumps(TOKENIZER)
    for label, text in {
        "empty": "",
        "list": "[]",
        "cut": good[:-9],
        "deep": '{"model": ' * 3000 + "1" + "}" * 3000,
        "NUL": good + "\0",
        "word": "x",
    }.items():
        yield case(label, tokenizer__json=text)
        yield case(f"settings {label}", tokenizer__json=good, tokenizer_config__json=text)
    for encoding in ("utf-16", "latin-1"):
        yield case(
            encoding,
            tokenizer__json=(good if encoding == "utf-16" else good[:-1] + ', "é": 1}').encode(
                encoding
            ),
        )
        yield case(f"words {encoding}", vocab__txt="[PAD]\né\n".encode(encoding))
    yield case("no file")
    yield case("no words", vocab__txt="")
    yield case("settings of words", vocab__txt="[PAD]\n[UNK]\na\n", tokenizer_config__json="[1]")
    yield case("merges that are no text", vocab__json='{"a": 1}', merges__txt=b"\xff\xfe\xfa")
    for number, content in enumerate(_pieces()):
        yield case(f"SentencePiece {number}", tokenizer__model=content)
    for label, make in SPECIAL.items():
        yield Case("tokenizer", label, _with("data.tokenizer", make))
        if label not in ("empty", "nothing", "NUL"):
            yield Case(
                "tokenizer file",
                label,
                _with(
                    "data.tokenizer",
                    lambda folder, make=make: _named(folder, make, "tokenizer.json"),
                ),
            )


def encoders(seed: int, count: int) -> Iterator[Case]:
    """A tokenizer.json with one part of another kind: `make plan` refuses it, or it encodes and decodes whatever text comes."""
    good, draw = (
        json.loads(Path(folders.template(), "data", "small", "tokenizer.json").read_text()),
        random.Random(seed),
    )
    places = list(_places(good))
    for number in range(count):
        place, value = (
            draw.choice(places),
            draw.choice(
                (*WRONG[:-1], "(a+)+$", "(((", {"type": "Evil"}, {"Regex": "["}, 2**40, "\0")
            ),
        )
        text = json.dumps(_put(good, place, copy.deepcopy(value)))
        yield Case(
            "encoder",
            f"{number}: {place} = {value!r}"[:90],
            _used(tokenizer__json=text),
            refused=False,
        )
    for name, text in {
        "no unknown token": "[PAD]\n[SEP]\na\n",
        "blank words": "[PAD]\n[SEP]\n\n\n",
        "with blanks": "[UNK] \n [SEP]\n",
    }.items():
        yield Case("encoder", name, _used(vocab__txt=text), refused=True)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:3])
        if isinstance(value, list)
        else ()
    ):
        yield from _places(inner, (*place, key)) if place != ("model", "vocab") or inner < 5 else ()


def _used(**files: str | bytes) -> Callable[[Path], object]:
    load = _with("data.tokenizer", folder_of(**files))

    def run(folder: Path) -> None:
        load(folder)
        require_use(Data(tokenizer=str(folder / "folder"), **dict.fromkeys(OTHER_KEYS)))  # type: ignore[arg-type]
        tokenizer = load_tokenizer(folder / "folder")
        ids, _ = tokenizer.encode(["Document 1 says \0 \u6f22 " + "a" * 99])
        assert all(0 <= id < tokenizer.vocabulary_size for id in ids), "an id beyond its vocabulary"
        tokenizer.decode(list(map(int, ids)))

    return run


OTHER_KEYS = {field.name for field in fields(Data)} - {"tokenizer"}


def _put(content: Any, path: tuple[str, ...], value: Any) -> Any:
    content = copy.deepcopy(content)
    place = content
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return content


def _pieces() -> Iterator[bytes]:
    """SentencePiece models that are cut, endless, of other types, or of tokens that nobody could look at."""

    def field(number: int, content: bytes) -> bytes:
        size, length = len(content), b""
        while True:
            length += bytes([size & 127 | (128 if size > 127 else 0)])
            if not (size := size >> 7):
                return bytes([number << 3 | 2]) + length + content

    spec = field(2, b"\x18\x02") + field(3, b"")
    piece = field(1, field(1, b"a") + b"\x15" + struct.pack("<f", -1.0))
    yield from (
        b"",
        b"\0",
        b"x",
        b"\xff" * 20,
        b"\xff" * 2_000_000,
        b"\x0a",
        b"\x0a\xff\xff\xff\xff\x7f",
        piece,
        spec,
        b"\x08\x01" + spec,
        field(1, b"\x08\x01") + spec,
    )
    yield field(1, field(1, b"\xff\xfe")) + spec
    yield field(1, field(1, b"a") + b"\x15" + struct.pack("<f", float("nan"))) + spec
    yield field(1, field(1, b"a") + b"\x10\x01") + spec
    yield field(1, field(1, b"a" * 1_000_000)) + spec
    yield piece + field(2, b"\x18\x07") + field(3, b"")
    yield piece + field(2, b"\x1a\x01x") + field(3, b"")
    yield piece + spec[:-1] + b"\x00" + b"\x18\x05"
    yield piece + field(2, b"\x18\x02") + field(3, b"\x10\x01")
    draw = random.Random(5)
    for _ in range(40):
        yield bytes(draw.choices(range(256), k=draw.randrange(1, 400)))
