"""Guards what a process prints: secrets are hidden, and control characters in foreign text are made visible.

TRAINFLEET_SECRETS names the variables whose values are secret (fleet.secrets). A value is hidden as it is and in the spellings of
JSON, Python, HTML, URLs, hexadecimal and base64, also as a part of what was base64-encoded, as in headers; of a value of several
lines each longer line too, as logs are written line by line. Where secrets overlap, their union is hidden. Standard library only:
supervisors start with it.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import html
import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TextIO
from urllib.parse import quote

NAMES = "TRAINFLEET_SECRETS"
HIDDEN = "***"
LEAST, LEAST_LINE = 4, 8  # characters of a value, and of one of its lines: shorter ones would hide half of every text
WRAPPED = (64, 76)  # letters of a line of base64: RFC 7468's, RFC 2045's
COMMANDS = re.compile(  # of our Makefile, wherever a text names one
    r"\bmake (setup|doctor|recipes|config|plan|tokenize|train|profile|scaling|rehearse|inspect|sample|status|logs|stop"
    r"|checkpoints|verify|eval|export|report|clean|build|push|ls|runs|compare|compile|watch)\b"
)
TYPED = "TRAINFLEET_TYPED"  # has the words of the command that say which config and run it is about (cli)
LONGEST = 500  # characters that a next command takes over from the one that was typed
OF_NO_RUN = ("config", "recipes", "runs", "compare", "ls")
NEXT = re.compile(r"^ *next: .*", re.MULTILINE)
IN_ADDRESS = re.compile(r"(?<=http://)[^/\s@]+(?=@)|(?<=https://)[^/\s@]+(?=@)")  # user:password@ of a proxy
# Control characters except newline and tab; characters that change the direction of text; Unicode line separators.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]")


def keep_secret(names: Iterable[str]) -> None:
    """Registers variables whose values are hidden from now on, here and in every process that this one starts."""
    known = filter(None, os.environ.get(NAMES, "").split(","))
    if all_names := list(dict.fromkeys((*known, *names))):
        os.environ[NAMES] = ",".join(all_names)


def hide(text: str) -> str:
    """The text with *** for every secret in it, and for the password in an address."""
    text = IN_ADDRESS.sub(HIDDEN, text) if "@" in text else text
    covered = sorted(part for pattern in _patterns() for part in _places(text, pattern))
    if not covered:
        return text
    parts, end = [], 0
    for start, stop in covered:
        if start >= end:
            parts += [text[end:start], HIDDEN]
        end = max(end, stop)
    return "".join([*parts, text[end:]])


def hide_bytes(line: bytes) -> bytes:
    """As `hide`, for bytes, which need not be UTF-8."""
    return hide(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape") if _patterns() else line


def hide_all(value: Any) -> Any:
    """A JSON value with the secrets hidden in all its strings; keys are ours."""
    match value:
        case str():
            return hide(value)
        case dict():
            return {key: hide_all(inner) for key, inner in value.items()}
        case list() | tuple():
            return [hide_all(inner) for inner in value]
    return value


def visible(text: object) -> str:
    r"""Foreign text made safe for a terminal: characters that move the cursor or change direction are written as \x1b, \u202e."""
    return CONTROLS.sub(lambda match: _escaped(match[0]), str(text).replace("\r\n", "\n"))


def _escaped(letter: str) -> str:
    return f"\\x{ord(letter):02x}" if ord(letter) < 0x100 else f"\\u{ord(letter):04x}"


def _patterns() -> tuple[str, ...]:
    return _spellings(tuple(os.environ.get(name, "") for name in os.environ.get(NAMES, "").split(",") if name))


@functools.lru_cache(maxsize=4)
def _spellings(values: tuple[str, ...]) -> tuple[str, ...]:
    """All strings to hide for these values."""
    found: dict[str, None] = {}
    for value in (value.strip() for value in values):
        lines = [line.strip() for line in value.splitlines()]
        for part in (*([value] if len(value) >= LEAST else []), *(line for line in lines if len(line) >= LEAST_LINE)):
            spelt = (json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1], repr(part)[1:-1], html.escape(part),
                     quote(part, safe="", errors="surrogateescape"), quote(part, errors="surrogateescape"))  # fmt: skip
            found |= dict.fromkeys((part, *spelt, *_encoded(part.encode("utf-8", "surrogateescape"))))
    return tuple(found)


def _encoded(value: bytes) -> Iterator[str]:
    """A value in hexadecimal and base64: the digits that depend on it alone at each offset, and wrapped lines at offset 0."""
    texts = [value.hex(), value.hex().upper()]
    for before in range(3):
        first, last = -(-8 * before // 6), 8 * (before + len(value)) // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            own = encode(bytes(before) + value).decode()[first:last]
            texts += [own, *(own[at : at + width] for width in WRAPPED for at in range(0, len(own), width) if not before)]
    return (text for text in texts if len(text) >= LEAST_LINE)


def _places(text: str, pattern: str) -> Iterable[tuple[int, int]]:
    """Where a pattern occurs, overlapping itself too."""
    start = text.find(pattern)
    while start >= 0:
        yield start, start + len(pattern)
        start = text.find(pattern, start + 1)


def shown(text: object) -> str:
    """Foreign text without secrets and control characters: for code that draws on a terminal itself."""
    return visible(hide(str(text)))


class Stream:
    """A text stream that hides secrets and makes control characters visible.

    A secret may be split over several writes: text that may begin one is held back.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._held, self._turn = stream, "", threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Takes all of the text."""
        with self._turn:
            whole = self._held + text
            keep = _begun(whole)
            self._held = whole[len(whole) - keep :]
            self._stream.write(_as_typed(shown(whole[: len(whole) - keep])))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stream.flush()

    def release(self) -> None:
        """Writes what was held back, which turned out to be no secret."""
        with self._turn:
            held, self._held = self._held, ""
            self._stream.write(shown(held))
            self._stream.flush()


def completed(next: str) -> str:
    """The commands in it with the config or run that was typed; without, they would be about the one in config.yaml."""
    typed = os.environ.get(TYPED, "")
    if not typed or len(typed) > LONGEST or re.search("(CONFIG|RUN|SET)=", next):
        return next
    return COMMANDS.sub(lambda command: command[0] + (typed if command[1] not in OF_NO_RUN else ""), next)


def _as_typed(text: str) -> str:
    """The text with commands as their user types them: `trainfleet train` where that is installed, and about the same config."""
    if "next: " in text:
        text = NEXT.sub(lambda line: completed(line[0]), text)
    command = os.environ.get("TRAINFLEET_COMMAND")
    if command != "trainfleet":
        return text
    return COMMANDS.sub(r"trainfleet \1", text).replace("make shows", "trainfleet --help shows")


def _begun(text: str) -> int:
    """How many of the last characters must be held back, as a secret may begin in them."""
    keep = 0
    for pattern in _patterns():
        longest = min(len(pattern) - 1, len(text))
        keep = max(keep, next((size for size in range(longest, keep, -1) if text.endswith(pattern[:size])), 0))
    cut = len(text) - keep
    for start, stop in sorted((part for pattern in _patterns() for part in _places(text, pattern)), reverse=True) if keep else ():
        cut = start if start < cut < stop else cut
    return len(text) - cut


def unguarded(stream: TextIO) -> TextIO:
    """The stream behind a guarded one: for code that moves the cursor itself, and passes foreign text through `shown`."""
    return stream._stream if isinstance(stream, Stream) else stream


def is_agreed(question: str) -> bool:
    """Whether the person at the terminal says yes; without a terminal nobody is asked, and the answer is no."""
    return sys.stdin.isatty() and input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def discard(stream: TextIO) -> None:
    """From now on what is written to a stream goes nowhere, and what it still holds too: whoever read it has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def install() -> None:
    """Guards this process's stdout and stderr until it ends, and has it print its Python stacks if native code crashes."""
    import atexit
    import faulthandler

    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed by whoever started this: the next file that is opened must not take its place
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
    faulthandler.enable(sys.stderr)
    guard = guarded()
    guard.__enter__()
    atexit.register(guard.__exit__, None, None, None)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Guards stdout and stderr within `with`, and flushes what is held back at its end."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in before.items():
        if getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that knows ASCII alone gets a ? where others get a dot
        setattr(sys, name, stream if isinstance(stream, Stream) else Stream(stream))
    try:
        yield
    finally:
        full = [error for name, stream in before.items() if (error := _ended(name, stream))]
        if full and not isinstance(sys.exception(), Exception):
            raise full[0]


def _ended(name: str, stream: TextIO) -> OSError | None:
    """Writes what a guarded stream still holds, and puts the stream itself back; the error where that does not fit on a disk."""
    full = None
    try:
        getattr(sys, name).release()
    except ValueError:
        pass  # it is closed
    except OSError as error:
        full = None if isinstance(error, BrokenPipeError) else error  # its reader has left
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())  # else Python itself tries again at its end
    setattr(sys, name, stream)
    return full
