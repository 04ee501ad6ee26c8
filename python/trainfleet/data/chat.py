"""Validates conversations, renders them with a model's chat template, and encodes them with a loss
mask.

A chat template is an untrusted program. It runs in Jinja's sandbox, in a process with a memory
limit, and for at most SECONDS.

Rendered conversations contain markers around the parts to learn. Encoded ones have signed ids: an
id that is excluded from the loss is stored as its complement (~id), which is negative.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from ..config.conversion import SETTINGS
from ..config.vocabulary import named_tokens
from ..trust import untrusted_input
from ..trust.errors import DataError
from ..trust.untrusted_input import printable, shortened, show
from .bad_records import LINE

if TYPE_CHECKING:
    from types import FrameType

    from .encoders import Ids, Offsets

JINJA = "chat_template.jinja"
SECONDS = 5.0  # maximum time to render one conversation
LARGEST = 2**22  # maximum characters of a rendered conversation
# Markers around each part to learn: unpaired surrogates, which no valid record contains
BEGIN, END = "\ud800", "\udfff"
MARKS = re.compile(f"[{BEGIN}{END}]")
# Jinja tags around the assistant's text, an extension by transformers
GENERATION, ENDS = (
    re.compile(rf"(\{{%[-+]?\s*){name}(\s*[-+]?%\}})") for name in ("generation", "endgeneration")
)
# Templates may print the current date. To keep datasets reproducible, they always get the date that
# Llama 3's template prints by default.
DATE = datetime(2024, 7, 26, tzinfo=UTC)
USER, ASSISTANT = "user", "assistant"
PROBE = [{"role": USER, "content": "Hi"}, {"role": ASSISTANT, "content": "Hello"}]
REWRITES = (
    "the chat template changes earlier answers when a conversation continues; only the last answer "
    "of such a conversation is learned"
)
Messages = list[dict[str, Any]]


class BadTemplate(DataError):
    """Raised if rendering exceeds a limit. Unlike a bad record, it is never skipped."""


def messages_of(record: Mapping[str, Any], where: str) -> Messages:
    """Returns a record's messages. Raises DataError if the record is not a conversation."""
    found: Any = record.get("messages")
    if "messages" not in record:
        pair = zip((USER, ASSISTANT), (record["prompt"], record["completion"]), strict=True)
        found = [{"role": role, "content": content} for role, content in pair]
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise bad(f"`messages` is {show(found)}, not a list of messages", where)
    # In a table, fields that a message lacks are null.
    messages = [{k: v for k, v in message.items() if v is not None} for message in found]
    for number, message in enumerate(messages, 1):
        if what := _fault(number, message):
            raise bad(f"message {number} {what}", where)
    if all(message["role"] != ASSISTANT for message in messages):
        raise bad("has no message of the assistant", where)
    return messages


def _fault(number: int, message: Mapping[str, Any]) -> str:
    """Returns the error in the message at a 1-based position, or "" if it is valid."""
    role, content = message.get("role"), message.get("content", "")
    if not isinstance(role, str) or not isinstance(content, str):
        return "must have a role and a text as its content"
    if role == "system" and number > 1:
        return "is a system message, which must be the first"
    empty = role == ASSISTANT and not (content.strip() or message.get("tool_calls"))
    return "is an empty answer" if empty else ""


def bad(what: str, where: str) -> DataError:
    return DataError(what, where=where, next=LINE)


@dataclass
class ChatTemplate:
    """Chat template, with the special tokens that it may print.

    `rewrites` becomes true once the template has changed an earlier answer of a conversation, so
    that only the last one can be learned.
    """

    source: str
    tokens: dict[str, str]
    where: str
    rewrites: bool = False

    @classmethod
    def read(cls, path: Path) -> ChatTemplate:
        """Reads the template beside a tokenizer, as transformers does. Raises DataError if the
        folder has no template.
        """
        folder = path if path.is_dir() else path.parent
        where, found = folder / JINJA, cast(Any, None)
        if where.is_file():
            found = untrusted_input.read_text(where, untrusted_input.MEBIBYTE)
        elif (where := folder / SETTINGS).is_file():
            found = untrusted_input.read_json(where).get("chat_template")
        if isinstance(found, list):  # named templates
            forms = [each for each in found if isinstance(each, dict)]
            found = next((f.get("template") for f in forms if f.get("name") == "default"), None)
        if not isinstance(found, str):
            remedy = f"set data.tokenizer to the folder of a chat model, or write {JINJA} there"
            raise DataError("has no chat template", where=str(folder), next=remedy)
        roles = {k: token for k, token in named_tokens(path)[0].items() if k.endswith("_token")}
        return cls(found, roles, str(where))

    @property
    def definition(self) -> str:
        """Content of a tokenizer_config.json that `read` turns back into this template."""
        return json.dumps(self.tokens | {"chat_template": self.source}, indent=2, sort_keys=True)

    def text_of(self, messages: str, where: str) -> str:
        """Renders a JSON conversation with markers.

        Raises DataError if rendering fails, or if all or none of the text would be learned.
        """
        with self.limited(where):
            text = self.marked(json.loads(messages))
        parts = MARKS.split(text)
        if not "".join(parts[1::2]).strip() or not "".join(parts[::2]).strip():
            raise bad("has all or none of its text marked as learned by the chat template", where)
        return text

    def marked(self, messages: Messages) -> str:
        """Renders a conversation, with markers around the parts to learn.

        These parts are the template's `generation` blocks. If it has none, each answer is learned
        from the end of its generation prompt, without trailing whitespace.
        """
        text = self.render(messages)
        if len(text) > LARGEST:
            raise ValueError(f"its text has more than {LARGEST:,} characters")
        if GENERATION.search(self.source):
            return text
        spans = [
            self._span(messages[: number + 1], text)
            for number, message in enumerate(messages)
            if message["role"] == ASSISTANT
        ]
        if None in spans[:-1]:
            spans, self.rewrites = spans[-1:], True
        if None in spans:
            raise ValueError("the answer does not start with the template's generation prompt")
        for begin, end in filter(None, reversed(spans)):
            text = f"{text[:begin]}{BEGIN}{text[begin:end]}{END}{text[end:]}"
        return text

    def _span(self, messages: Messages, text: str) -> tuple[int, int] | None:
        """Returns the span of the last message's answer in `text`, which contains the whole
        conversation.

        Returns None if `messages` do not render to a prefix of `text`.
        """
        before, after = self.render(messages[:-1], True), self.render(messages)
        begin, end = len(before), len(after.rstrip())
        matches = text.startswith(after) and after.startswith(before)
        return (begin, end) if matches and begin < end else None

    def render(self, messages: Messages, prompt: bool = False) -> str:
        """Renders messages. If `prompt`, appends the template's generation prompt."""
        text: str = self.compiled.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=prompt,
            **self.tokens,
        )
        return text

    @cached_property
    def compiled(self) -> Any:
        """Compiled template, in a sandbox that mirrors the Jinja environment of transformers.

        `generation` blocks become calls that add the markers.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": DATE.strftime,
            "marked": lambda caller: f"{BEGIN}{caller()}{END}",
        }
        source = GENERATION.sub(r"\1call marked()\2", self.source)
        return environment.from_string(ENDS.sub(r"\1endcall\2", source))

    def end_of_turn(self, encoder: ChatEncoder) -> int:
        """Returns the token that ends an answer. Raises DataError if it is not a special token,
        because a model can't learn to stop without one.
        """
        ids, _ = encoder.encode([self.marked(PROBE)])
        last = int(ids[ids >= 0][-1:].sum())
        if last in encoder.tokenizer.get_added_tokens_decoder():
            return last
        raise DataError(
            "ends an answer without a special token",
            where=self.where,
            why=f"its last learned token is {show(encoder.tokenizer.id_to_token(last))}",
            next="set data.tokenizer to a tokenizer that has the template's tokens",
        )

    @contextmanager
    def limited(self, where: str) -> Iterator[None]:
        """Limits the rendering time, and converts template errors to DataError."""

        def stop(number: int, frame: FrameType | None) -> NoReturn:
            raise TimeoutError(f"rendering takes more than {SECONDS:.0f} s")

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            yield
        except DataError:
            raise
        except Exception as error:
            why = shortened(printable(f"{type(error).__name__}: {error}"), 300)
            kind, then = DataError, LINE
            if isinstance(error, TimeoutError | MemoryError | RecursionError):
                kind, then = BadTemplate, "set data.tokenizer to another chat model"
            what = f"can't be rendered with the chat template in {self.where}"
            raise kind(what, where=where, why=why, next=then) from error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


class ChatEncoder:
    """Encoder that turns marked texts into signed ids and recognizes special tokens in them."""

    name = package = "tokenizers"

    def __init__(self, definition: str) -> None:
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_str(definition)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        import numpy as np

        split = list(map(MARKS.split, texts))
        found = self.tokenizer.encode_batch(list(map("".join, split)), add_special_tokens=False)
        ids = [np.empty(0, np.int64)]
        for parts, encoding in zip(split, found, strict=True):
            learned = np.repeat(np.arange(len(parts)) % 2, list(map(len, parts)))
            before = np.concatenate([[0], np.cumsum(learned)])  # learned characters so far
            begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            one = np.array(encoding.ids, np.int64)
            known = before[ends] == before[begins]
            known[:1] = True  # never learned, because no token precedes it
            ids.append(np.where(known, ~one, one))
        return np.concatenate(ids), np.cumsum(list(map(len, ids)))
