"""Reads the vocabulary of a tokenizer, in any format that conversion.py supports.

The vocabulary is all that validating a config requires of a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Required, Self, TypedDict, TypeVar

from ..trust import untrusted_input
from ..trust.errors import DataError, InputError
from ..trust.untrusted_input import show
from ..trust.validation import fit
from .addresses import folder_of
from .conversion import LARGEST, SETTINGS, TokenizerSettings, added, convert, told
from .families import FAMILIES
from .types import Data

TRAINED = "bpe"  # value of data.tokenizer that trains a new tokenizer
FILE = "tokenizer.json"
DEEPEST = 64  # maximum nesting depth of a tokenizer.json; sequences can contain sequences
# parts of a tokenizer.json that transform text
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
LONGEST = 4096  # maximum length of a string in PARTS, except SentencePiece's character table
TABLE = ".precompiled_charsmap"
MOST_TOKENS = 2_000_000  # maximum value of model.vocab_size
END_OF_DOCUMENT = "<|endoftext|>"
ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "<|eos|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
# special tokens that trained tokenizers include for masked models
PADDING, MASK = ("<|pad|>", "<|mask|>")
SPECIALS = {  # role in a masked model's input → token names
    "start": ("[CLS]", "<s>", "<|startoftext|>", END_OF_DOCUMENT),
    "separator": ("[SEP]", "</s>", END_OF_DOCUMENT),
    "mask": ("[MASK]", "<mask>", MASK),
    "padding": ("[PAD]", "<pad>", PADDING, END_OF_DOCUMENT),
}

T = TypeVar("T")


class Added(TypedDict):
    """Entry of `added_tokens`."""

    id: int
    content: str


class Algorithm(TypedDict, total=False):
    """Tokenizer algorithm. `vocab` is validated separately, because it can be huge."""

    type: Literal["BPE", "WordPiece", "WordLevel", "Unigram"]
    vocab: Required[Any]
    unk_token: str | None
    unk_id: int | None


class Definition(TypedDict, total=False):
    """Keys read from tokenizer.json."""

    model: Required[Algorithm]
    added_tokens: list[Added]


class Vocabulary:
    """A tokenizer.json's vocabulary, parsed on first use."""

    def __init__(self, definition: str, where: str, end_token: str | None = None) -> None:
        self.definition, self.where, self.end_token = definition, where, end_token
        self.sha256 = hashlib.sha256(definition.encode()).hexdigest()

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Maps each token to its ID. Raises DataError if the definition is invalid."""
        try:
            return _vocabulary(untrusted_input.parse_json(self.definition, self.where, DEEPEST))
        except InputError as error:
            what, why = "is not a tokenizer.json", ": ".join(filter(None, (error.key, error.what)))
            where = (
                error.where or f"{self.where}:{untrusted_input.line_of(self.definition, error.key)}"
            )
            raise DataError(
                what, where=where, why=why, next="set data.tokenizer to another tokenizer"
            ) from error

    @cached_property
    def vocabulary_size(self) -> int:
        """Returns the largest token ID plus one, which is the minimum embedding size."""
        return max(self.vocabulary.values()) + 1

    @cached_property
    def end_of_document(self) -> int:
        """Returns the end-of-document token's ID. Raises DataError if the vocabulary has none."""
        names = (self.end_token,) if self.end_token else ENDS
        for token in names:
            if token in self.vocabulary:
                return self.vocabulary[token]
        why = f"its vocabulary has none of {', '.join(names)}"
        raise DataError(
            "has no end-of-document token",
            where=self.where,
            why=why,
            next="set eos_token in tokenizer_config.json",
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a tokenizer.json, a folder that contains one, or a format that conversion.py
        supports.

        Raises:
            DataError: the tokenizer is missing or invalid.
        """
        try:
            definition, where = _found(path)
            roles, more = named_tokens(path)
            return cls(_with_added(definition, more, where), where, roles.get("eos_token"))
        except (OSError, ValueError) as error:
            where = (
                error.where if isinstance(error, InputError) else ""
            ) or untrusted_input.shortened(str(path), 255)
            said = (
                error.head.removeprefix(f"{where}: ")
                if isinstance(error, InputError)
                else str(error)
            )
            why = (error.strerror if isinstance(error, OSError) else None) or said
            if isinstance(error, FileNotFoundError) and path.is_dir():
                why = told(path) or f"the folder has no {FILE}, tokenizer.model or vocab.txt"
            remedy = f"set data.tokenizer to `{TRAINED}` or a tokenizer.json"
            raise DataError(
                "can't be read as a tokenizer", where=where, why=why, next=remedy
            ) from error


def _found(path: Path) -> tuple[str, str]:
    """Returns the text of the tokenizer.json, converted if necessary, and its source."""
    file = path / FILE if path.is_dir() else path
    if file.is_file() and (what := told(file)):
        raise InputError(what, where=str(file))
    if (file.suffix == ".json" and file.is_file()) or (definition := convert(path)) is None:
        return untrusted_input.read_text(file, LARGEST), str(file)
    return definition, str(path)


def named_tokens(path: Path) -> tuple[dict[str, str], list[str]]:
    """Returns the special tokens by role (such as `eos_token`), and the added tokens in ID order.

    As in transformers 5, special_tokens_map.json and added_tokens.json are read only if
    tokenizer_config.json lists no added tokens.
    """
    folder = path if path.is_dir() else path.parent
    given: dict[str, Any] = {**_read(TokenizerSettings, folder / SETTINGS)}
    if "added_tokens_decoder" in given:
        ids = {
            token["content"]: int(id_) for id_, token in given.pop("added_tokens_decoder").items()
        }
    else:
        given |= _read(TokenizerSettings, folder / "special_tokens_map.json")
        ids = _read(dict[str, int], folder / "added_tokens.json")
    tokens = {
        role: value.get("content") if isinstance(value, dict) else value  # values may have any type
        for role, value in given.items()
    }
    return {role: token for role, token in tokens.items() if isinstance(token, str)}, sorted(
        ids, key=lambda token: ids[token]
    )


def _read(kind: type[T], file: Path) -> T:
    return fit(kind, untrusted_input.read_json(file) if file.exists() else {}, str(file))


def _with_added(definition: str, tokens: list[str], where: str) -> str:
    """Adds tokens that only other files in the folder define, numbered as in `tokenizers`."""
    if all(json.dumps(token, ensure_ascii=False) in definition for token in tokens):
        return definition
    content = untrusted_input.parse_json(definition, where, DEEPEST)
    known = _vocabulary(content)
    lacking = [token for token in tokens if token not in known]
    numbered = [added(id_, token) for id_, token in enumerate(lacking, max(known.values()) + 1)]
    content["added_tokens"] = [*content.get("added_tokens", []), *numbered]
    return json.dumps(content, ensure_ascii=False) if lacking else definition


def vocabulary_size_of(data: Data) -> int:
    """Returns the vocabulary size of the config's tokenizer: the largest ID plus one.

    Loads no tokenizer library.
    """
    if data.tokenizer == TRAINED:
        return data.vocab_size
    vocabulary = Vocabulary.read(folder_named(data))
    _ = vocabulary.end_of_document  # raises DataError without an end token
    return vocabulary.vocabulary_size


def folder_named(data: Data) -> Path:
    """Returns the local path of data.tokenizer. Raises DataError if it can't be downloaded."""
    try:
        return folder_of(data.tokenizer)
    except InputError as error:
        raise DataError(error.what, where=error.where, why=error.why, next=error.next) from error


def lack_for(data: Data, family: str) -> str | None:
    """Returns what the config's tokenizer lacks for a masked model, or None.

    RoBERTa numbers positions from the row after its padding token's ID, so this ID must be 1.
    """
    if FAMILIES[family].causal or data.tokenizer == TRAINED:
        return None
    vocabulary = Vocabulary.read(folder_named(data)).vocabulary
    for role, names in SPECIALS.items():
        if not any(name in vocabulary for name in names):
            return (
                f"has no {role} token, which model.family {family} needs: one of {', '.join(names)}"
            )
    padding = next(vocabulary[name] for name in SPECIALS["padding"] if name in vocabulary)
    if (rows := FAMILIES[family].positions_from) and padding != rows - 1:
        return (
            f"has its padding token at ID {padding}, but model.family {family} needs ID "
            f"{rows - 1}; model.family bert does not"
        )
    return None


def _vocabulary(content: Any) -> dict[str, int]:
    """Maps each token to its ID, including added tokens. Raises InputError if the vocabulary is
    invalid.
    """
    definition = fit(Definition, content)
    kind, vocab = definition["model"].get("type", "BPE"), content["model"].get("vocab")
    if (
        not isinstance(vocab, dict if kind in ("BPE", "WordPiece", "WordLevel") else list)
        or not vocab
    ):
        raise InputError(
            f"must be the token table of a {kind} model, not {show(vocab)}", key="model.vocab"
        )
    tokens = dict(vocab) if isinstance(vocab, dict) else _scored(vocab)
    _require_ids(tokens, "model.vocab")
    added = {token["content"]: token["id"] for token in definition.get("added_tokens", [])}
    _require_ids(added, "added_tokens")
    for part in PARTS:
        _require_short(content.get(part), part)
    return tokens | added


def _require_short(value: Any, key: str) -> None:
    """Rejects long strings in parts that transform text, because any word could become as long."""
    match value:
        case str() if len(value) > LONGEST and not key.endswith(TABLE):
            raise InputError(
                f"has {len(value):,} characters; at most {LONGEST:,} are allowed", key=key
            )
        case dict():
            for name, inner in value.items():
                _require_short(inner, f"{key}.{name}")
        case list():
            for place, inner in enumerate(value):
                _require_short(inner, f"{key}[{place}]")


def _require_ids(tokens: dict[str, Any], key: str) -> None:
    for token, id_ in tokens.items():
        if type(id_) is not int or not 0 <= id_ < MOST_TOKENS:
            raise InputError(
                f"{show(token)} must have an integer below {MOST_TOKENS:,} as its ID, not "
                f"{show(id_)}",
                key=key,
            )


def _scored(vocab: list[Any]) -> dict[str, int]:
    """Maps the tokens of a Unigram model, a list of (token, score) pairs, to their IDs."""
    for index, pair in enumerate(vocab):
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and type(pair[1]) in (int, float)
        ):
            raise InputError(
                f"must be a token and its score, not {show(pair)}", key=f"model.vocab[{index}]"
            )
    return {token: id_ for id_, (token, _) in enumerate(vocab)}
