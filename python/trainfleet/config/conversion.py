"""Converts other tokenizer formats to tokenizer.json: SentencePiece models, WordPiece vocabularies,
and vocab.json with merges.txt.

The definitions follow the Hugging Face ports by the models' authors: Llama 2 for SentencePiece BPE,
T5 for Unigram, BERT for WordPiece and GPT-2 for byte-level BPE. tests/oracles compares the results
with the original libraries.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from ..trust import untrusted_input
from ..trust.errors import DataError
from ..trust.validation import fit
from .foreign_formats import LIST, TIKTOKEN

Definition = dict[str, Any]
# Maximum size of a tokenizer file. The largest published files are 35 MiB.
LARGEST = 128 * untrusted_input.MEBIBYTE
LONGEST = 1024  # maximum token length in bytes, because _merges tries every split
SETTINGS = "tokenizer_config.json"
T = TypeVar("T")
SPACE = "\u2581"  # SentencePiece's symbol for a space
# SentencePiece.Type in sentencepiece_model.proto
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = (1, 2, 3, 4, 6)
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
# Special tokens of GPT-2 and RoBERTa.
BYTE_LEVEL_SPECIAL = ("<|endoftext|>", "<s>", "</s>", "<pad>", "<unk>", "<mask>")


class Named(TypedDict):
    """Token given as an object. Only its text is used."""

    content: str


Token = str | Named | None


class TokenizerSettings(TypedDict, total=False):
    """Keys read from tokenizer_config.json. special_tokens_map.json has the same token keys."""

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
                f"is a tiktoken file, as in Meta's Llama 3 folder; {LIST}",
                where=str(model),
                next=LIST,
            )
        return _dump(_from_sentencepiece(content, str(model)))
    if words is not None:
        return _dump(_from_wordpiece(words))
    return _dump(_from_merges(path / "vocab.json", merges)) if merges.exists() else None


def _file(path: Path, name: str, suffix: str) -> Path | None:
    found = path / name if path.is_dir() else path
    return found if found.is_file() and found.name.endswith(suffix) else None


def _dump(definition: Definition) -> str:
    return json.dumps(
        {"version": "1.0", "truncation": None, "padding": None, "post_processor": None}
        | definition,
        ensure_ascii=False,
    )


def added(id_: int, content: str, *, special: bool = True) -> Definition:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id_, "content": content, "special": special} | flags


def _from_wordpiece(path: Path) -> Definition:
    """Builds a BERT tokenizer.

    tokenizer_config.json sets whether text is lowercased. Without that setting, text is lowercased
    unless a token contains a capital letter.
    """
    tokens = untrusted_input.read_text(path, LARGEST).splitlines()
    file = path.with_name(SETTINGS)
    cased = any(token != token.lower() for token in tokens if not token.startswith("["))
    settings = (
        fit(TokenizerSettings, untrusted_input.read_json(file), str(file))
        if file.exists()
        else TokenizerSettings()
    )
    lower = settings.get("do_lower_case", not cased)
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    named = [
        token for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if token in vocabulary
    ]
    return {
        "added_tokens": [added(vocabulary[token], token) for token in named],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": lower,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }


def _from_merges(vocabulary: Path, merges: Path) -> Definition:
    """Builds a byte-level BPE tokenizer as in GPT-2 and RoBERTa."""
    vocab = fit(dict[str, int], untrusted_input.read_json(vocabulary, LARGEST), str(vocabulary))
    lines = untrusted_input.read_text(merges, LARGEST).splitlines()
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "added_tokens": [
            added(vocab[token], token) for token in BYTE_LEVEL_SPECIAL if token in vocab
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": _bpe(vocab, [line for line in lines if line and not line.startswith("#version")]),
    }


def _bpe(vocab: dict[str, int], merges: list[str], **more: Any) -> Definition:
    plain = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    return {
        "type": "BPE",
        **plain,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocab,
        "merges": merges,
    } | more


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
            next="set data.tokenizer to another tokenizer",
        ) from error
    unknown = next((id_ for id_, (_, _, type_) in enumerate(pieces) if type_ == UNKNOWN), None)
    byte_fallback = any(type_ == BYTE for _, _, type_ in pieces)
    listed = [
        added(id_, token, special=type_ != USER_DEFINED)
        for id_, (token, _, type_) in enumerate(pieces)
        if type_ in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    if kind == BPE:
        vocab = {token: id_ for id_, (token, _, _) in enumerate(pieces)}
        unk_token = None if unknown is None else pieces[unknown][0]
        merges = [f"{left} {right}" for left, right in _merges(pieces)]
        body = _bpe(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=byte_fallback)
    elif kind == UNIGRAM:
        scores = [[token, score] for token, score, _ in pieces]
        body = {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": scores,
            "byte_fallback": byte_fallback,
        }
    else:
        why, remedy = (
            f"type {kind}; supported: BPE, Unigram",
            "set data.tokenizer to another tokenizer",
        )
        raise DataError(
            "is a SentencePiece model of an unsupported type", where=where, why=why, next=remedy
        )
    return {
        "added_tokens": listed,
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": _decoder(prefix),
        "model": body,
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


def _decoder(prefix: bool) -> Definition:
    steps: list[Definition] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {
        "type": "Sequence",
        "decoders": [
            *steps,
            *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
        ],
    }


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Returns all pairs of pieces that form another piece, best score first.

    This is the order in which SentencePiece merges them.
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


def _piece(message: bytes) -> tuple[str, float, int]:
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
    """Parses a protobuf message to lists of values (int, float or bytes) by field number.

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
