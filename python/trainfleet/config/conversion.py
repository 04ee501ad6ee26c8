"""Converts SentencePiece models, WordPiece vocabularies, and vocab.json with merges.txt to
tokenizer.json. Also recognizes unsupported model and tokenizer formats, and suggests fixes.

tokenizers.yaml contains the templates. tests/oracles compares the results with the original
libraries.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from ..trust import untrusted_input
from ..trust.errors import DataError
from ..trust.validation import fit
from .tables import read_table

Definition = dict[str, Any]
# Maximum tokenizer file size. The largest published files are 35 MiB.
LARGEST = 128 * untrusted_input.MEBIBYTE
LONGEST = 1024  # maximum token length in bytes, because _merges tries every split
SETTINGS = "tokenizer_config.json"
ANOTHER = "set data.tokenizer to another tokenizer"
REMEDY = "use the tokenizer.json of the same model"
# line of a tiktoken file: a base64 token and its rank
TIKTOKEN = rb"[A-Za-z0-9+/]{1,400}={0,2} [0-9]{1,8}\r?\n"
T = TypeVar("T")
Piece = tuple[str, float, int]  # token, score and type
SPACE = "\u2581"  # SentencePiece's symbol for a space
# SentencePiece.Type in sentencepiece_model.proto
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = (1, 2, 3, 4, 6)
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
ALGORITHMS = {UNIGRAM: "SentencePiece Unigram", BPE: "SentencePiece BPE"}
# special tokens of GPT-2 and RoBERTa
BYTE_LEVEL_SPECIAL = ("<|endoftext|>", "<s>", "</s>", "<pad>", "<unk>", "<mask>")


class Named(TypedDict):
    """Token in object form, of which only the text is used."""

    content: str


Token = str | Named | None


class TokenizerSettings(TypedDict, total=False):
    """Keys read from tokenizer_config.json. special_tokens_map.json uses the same token keys."""

    bos_token: Token
    eos_token: Token
    unk_token: Token
    sep_token: Token
    pad_token: Token
    cls_token: Token
    mask_token: Token
    added_tokens_decoder: dict[str, Named]
    do_lower_case: bool


def convert(path: Path) -> str | None:
    """Converts a tokenizer to the JSON text of a tokenizer.json.

    `path` is a tokenizer.model, a vocab.txt, or a folder that contains one of them or vocab.json
    with merges.txt. Returns None for any other path.

    Raises:
        DataError: the file can't be converted.
    """
    model = _file(path, "tokenizer.model", ".model")
    words = _file(path, "vocab.txt", "vocab.txt")
    merges = path / "merges.txt"
    if model is not None:
        content = untrusted_input.read_bytes(model, LARGEST)
        if re.match(TIKTOKEN, content):
            raise DataError(
                f"is a tiktoken file, as in Meta's Llama 3 folder; {REMEDY}",
                where=str(model),
                next=REMEDY,
            )
        made = _from_sentencepiece(content, str(model))
    elif words is not None:
        made = _from_wordpiece(words)
    elif merges.exists():
        made = _from_merges(path / "vocab.json", merges)
    else:
        return None
    return json.dumps(made, ensure_ascii=False)


def _file(path: Path, name: str, suffix: str) -> Path | None:
    found = path / name if path.is_dir() else path
    return found if found.is_file() and found.name.endswith(suffix) else None


def _definition(form: str) -> Definition:
    found: Definition = read_table(Path(__file__).with_name("tokenizers.yaml"))[form]
    return found


def added(id_: int, content: str, *, special: bool = True) -> Definition:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id_, "content": content, "special": special} | flags


def _from_wordpiece(path: Path) -> Definition:
    """Builds a BERT tokenizer.

    Whether it lowercases text is set in tokenizer_config.json. By default, it does so unless a
    token contains a capital letter.
    """
    tokens = untrusted_input.read_text(path, LARGEST).splitlines()
    file = path.with_name(SETTINGS)
    cased = any(token != token.lower() for token in tokens if not token.startswith("["))
    settings = (
        fit(TokenizerSettings, untrusted_input.read_json(file), str(file))
        if file.exists()
        else TokenizerSettings()
    )
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    specials = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    made = _definition("wordpiece")
    made["added_tokens"] = _named(specials, vocabulary)
    made["normalizer"]["lowercase"] = settings.get("do_lower_case", not cased)
    made["model"]["vocab"] = vocabulary
    return made


def _named(tokens: Iterable[str], vocabulary: dict[str, int]) -> list[Definition]:
    return [added(vocabulary[token], token) for token in tokens if token in vocabulary]


def _from_merges(vocabulary: Path, merges: Path) -> Definition:
    """Builds a byte-level BPE tokenizer as in GPT-2 and RoBERTa."""
    vocab = fit(dict[str, int], untrusted_input.read_json(vocabulary, LARGEST), str(vocabulary))
    lines = untrusted_input.read_text(merges, LARGEST).splitlines()
    made = _definition("byte-level BPE")
    made["added_tokens"] = _named(BYTE_LEVEL_SPECIAL, vocab)
    rules = [line for line in lines if line and not line.startswith("#version")]
    made["model"] |= {"vocab": vocab, "merges": rules}
    return made


def _from_sentencepiece(content: bytes, where: str) -> Definition:
    """Builds a BPE (Llama 2) or Unigram (T5) tokenizer from a SentencePiece model, including its
    normalization.
    """
    try:
        model = _fields(content)
        pieces = [_piece(_bytes(field)) for field in model.get(1, [])]
        trainer, normalizer = (_fields(_last(model, number, bytes)) for number in (2, 3))
        kind, prefix = _last(trainer, 3, int, UNIGRAM), bool(_last(normalizer, 3, int, 1))
        steps = list(_normalizers(normalizer, prefix))
    except (IndexError, KeyError, ValueError, struct.error) as error:
        raise DataError(
            "is not a SentencePiece model",
            where=where,
            why=str(error),
            next=ANOTHER,
        ) from error
    if kind not in ALGORITHMS:
        raise DataError(
            "is a SentencePiece model of an unsupported type",
            where=where,
            why=f"type {kind}; supported: BPE, Unigram",
            next=ANOTHER,
        )
    made = _definition(ALGORITHMS[kind])
    made["added_tokens"] = list(_listed(pieces))
    made["normalizer"]["normalizers"] = steps
    if not prefix:
        made["decoder"]["decoders"].pop()  # Strip
    made["model"] |= _algorithm(kind, pieces)
    return made


def _listed(pieces: list[Piece]) -> Iterator[Definition]:
    for id_, (token, _, type_) in enumerate(pieces):
        if type_ in (UNKNOWN, CONTROL, USER_DEFINED):
            yield added(id_, token, special=type_ != USER_DEFINED)


def _algorithm(kind: int, pieces: list[Piece]) -> Definition:
    unknown = next((id_ for id_, (_, _, type_) in enumerate(pieces) if type_ == UNKNOWN), None)
    bytes_ = {"byte_fallback": any(type_ == BYTE for _, _, type_ in pieces)}
    if kind == UNIGRAM:
        return bytes_ | {"unk_id": unknown, "vocab": [[token, score] for token, score, _ in pieces]}
    return bytes_ | {
        "unk_token": None if unknown is None else pieces[unknown][0],
        "vocab": {token: id_ for id_, (token, _, _) in enumerate(pieces)},
        "merges": [f"{left} {right}" for left, right in _merges(pieces)],
    }


def _normalizers(spec: dict[int, list[Any]], prefix: bool) -> Iterator[Definition]:
    if table := _last(spec, 2, bytes, b""):
        yield {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    if _last(spec, 4, int, 1):  # remove_extra_whitespaces
        # The Strip normalizer would also remove other whitespace.
        yield {"type": "Replace", "pattern": {"Regex": "^ +| +$"}, "content": ""}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    if prefix:
        yield {"type": "Prepend", "prepend": SPACE}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def _merges(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Returns all pairs of pieces that form another piece, in SentencePiece's merge order: best
    score first.
    """
    ids = {
        token: id_
        for id_, (token, _, type_) in enumerate(pieces)
        if type_ in (NORMAL, USER_DEFINED)
    }
    pairs = [
        (-score, ids[token[:cut]], ids[token[cut:]])
        for token, score, type_ in pieces
        if type_ == NORMAL
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(pieces[left][0], pieces[right][0]) for _, left, right in sorted(pairs)]


def _piece(message: bytes) -> Piece:
    """Parses a piece into its token, score and type."""
    fields = _fields(message)
    token, score = _last(fields, 1, bytes), _last(fields, 2, float, 0.0)
    if len(token) > LONGEST or not math.isfinite(score):
        raise ValueError(f"a token has {len(token):,} bytes and the score {score}")
    return token.decode(), score, _last(fields, 3, int, NORMAL)


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"a token has the type {type(value).__name__}")
    return value


def _last(fields: dict[int, list[Any]], number: int, kind: type[T], default: T | None = None) -> T:
    """Returns the last value of a field, or `default` if the field is missing.

    Raises:
        ValueError: the value is not of type `kind`.
    """
    value = fields[number][-1] if number in fields else default
    if type(value) is not kind:
        raise ValueError(
            f"field {number} is {'missing' if value is None else f'a {type(value).__name__}'}"
        )
    return value


def _fields(message: bytes) -> dict[int, list[Any]]:
    """Parses a protobuf message into lists of values (int, float or bytes) by field number.

    See protobuf.dev/programming-guides/encoding.
    """
    fields: dict[int, list[Any]] = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
        elif tag & 7 == 1:
            value, at = struct.unpack_from("<d", message, at)[0], at + 8
        elif tag & 7 == 5:
            value, at = struct.unpack_from("<f", message, at)[0], at + 4
        elif tag & 7 == 2:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
            if at > len(message):
                raise ValueError(f"the file ends within a field of {size} bytes")
        else:
            raise ValueError(f"unknown wire type {tag & 7} at byte {at}")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _varint(message: bytes, at: int) -> tuple[Any, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if shift > 70:
            raise ValueError(f"the number before byte {at} has more than ten bytes")
        if byte < 128:
            return value, at


MOST = 4096  # maximum number of file names to read per folder
FORMATS = read_table(Path(__file__).with_name("foreign_formats.yaml"))


def told(path: Path) -> str:
    """Names the unsupported format of a file or folder, based on file names, and suggests a fix.

    Returns "" if the format is not recognized.
    """
    names = [at.name for at in islice(path.iterdir(), MOST)] if path.is_dir() else [path.name]
    for row in FORMATS:
        if any(fnmatchcase(name, mark) for name in names for mark in row["files"]):
            return f"is {row['name']}; {row['remedy']}"
    return ""
