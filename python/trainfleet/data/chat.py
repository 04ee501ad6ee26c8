"""Conversations: checks their records, renders them with a model's chat template, and encodes the
result with a mark on every token that the model learns.

A chat template is an untrusted program. It runs in Jinja's sandbox, in a process with a memory
limit, and for at most SECONDS.

A rendered conversation is a text with marks around the parts to learn, and its token ids are
signed: ids that are not learned are stored as their complement (~id), which is negative.
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
# Unpaired surrogates, which no valid record contains, around each part to learn
BEGIN, END = "\ud800", "\udfff"
MARKS = re.compile(f"[{BEGIN}{END}]")
# Tags around what the assistant says, an extension of transformers to Jinja
GENERATION, ENDS = (
    re.compile(rf"(\{{%[-+]?\s*){name}(\s*[-+]?%\}})") for name in ("generation", "endgeneration")
)
# Templates may print the current date. A dataset must not depend on it, so they get the date that
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
    """Raised if a chat template breaks a limit, which no record can cause."""


def messages_of(record: Mapping[str, Any], where: str) -> Messages:
    """Returns the messages of a record. Raises DataError if it is not a conversation."""
    found: Any = record.get("messages")
    if "messages" not in record:
        pair = zip((USER, ASSISTANT), (record["prompt"], record["completion"]), strict=True)
        found = [{"role": role, "content": content} for role, content in pair]
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise bad(f"`messages` is {show(found)}, not a list of messages", where)
    # Tables have a null wherever a message lacks a field that others have.
    messages = [{k: v for k, v in message.items() if v is not None} for message in found]
    for number, message in enumerate(messages, 1):
        if what := _fault(number, message):
            raise bad(f"message {number} {what}", where)
    if all(message["role"] != ASSISTANT for message in messages):
        raise bad("has no message of the assistant", where)
    return messages


def _fault(number: int, message: Mapping[str, Any]) -> str:
    """Returns what is wrong with the message at a 1-based position, or ""."""
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

    `rewrites` becomes true once it has rendered a conversation of which only the last answer can be
    learned.
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
        """Content of a tokenizer_config.json from which `read` returns this template."""
        return json.dumps(self.tokens | {"chat_template": self.source}, indent=2, sort_keys=True)

    def text_of(self, messages: str, where: str) -> str:
        """Renders a conversation, given as JSON, with marks. Raises DataError if it can't be."""
        with self.limited(where):
            text = self.marked(json.loads(messages))
        parts = MARKS.split(text)
        if not "".join(parts[1::2]).strip() or not "".join(parts[::2]).strip():
            raise bad("is learned wholly or not at all, according to the chat template", where)
        return text

    def marked(self, messages: Messages) -> str:
        """Renders a conversation, with marks around the parts to learn.

        These are the template's `generation` blocks. If it has none, a part is what an answer adds
        to the text that prompts for it, without the space at its end.
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
            raise ValueError("its generation prompt is not how the answer begins")
        for begin, end in filter(None, reversed(spans)):
            text = f"{text[:begin]}{BEGIN}{text[begin:end]}{END}{text[end:]}"
        return text

    def _span(self, messages: Messages, text: str) -> tuple[int, int] | None:
        """Returns the bounds of the last message's part in the text of a longer conversation."""
        before, after = self.render(messages[:-1], True), self.render(messages)
        begin, end = len(before), len(after.rstrip())
        matches = text.startswith(after) and after.startswith(before)
        return (begin, end) if matches and begin < end else None

    def render(self, messages: Messages, prompt: bool = False) -> str:
        """Renders messages; `prompt` asks for the start of an answer."""
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
        """The template in an environment that has what transformers' has.

        A `generation` block becomes a call that marks it.
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
            why=f"its last token to learn is {show(encoder.tokenizer.id_to_token(last))}",
            next="set data.tokenizer to a tokenizer that has the template's tokens",
        )

    @contextmanager
    def limited(self, where: str) -> Iterator[None]:
        """Limits the time of a rendering, and converts errors of the template to DataError."""

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
    """Encoder for marked texts, which also recognizes special tokens. It returns signed ids."""

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
            before = np.concatenate([[0], np.cumsum(learned)])  # learned characters before each one
            begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            one = np.array(encoding.ids, np.int64)
            known = before[ends] == before[begins]
            known[:1] = True  # no token comes before the first
            ids.append(np.where(known, ~one, one))
        return np.concatenate(ids), np.cumsum(list(map(len, ids)))
