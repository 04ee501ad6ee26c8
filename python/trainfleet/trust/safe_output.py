"""Guards what a process prints: secrets are hidden (trust/redaction.py), and control characters in
foreign text are made visible.

Standard library only: supervisors start with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from .redaction import begun, hide

COMMANDS = re.compile(  # of our Makefile, wherever a text names one
    r"\bmake "
    r"(setup|doctor|recipes|config|plan|tokenize|train|profile|scaling|rehearse|inspect|sample|status|logs|explain|stop"
    r"|new-backend|image|checkpoints|verify|eval|export|report|clean|build|push|ls|runs|compare|compile|watch)\b"
)
# has the words of the command that say which config and run it is about (cli)
TYPED = "TRAINFLEET_TYPED"
LONGEST = 500  # characters that a next command takes over from the one that was typed
OF_NO_RUN = ("config", "recipes", "runs", "compare", "explain", "ls", "new-backend")
NEXT = re.compile(r"^ *next: .*", re.MULTILINE)
# Control characters except newline and tab; characters that change the direction of text; Unicode
# line separators.
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]"
)


def visible(text: object) -> str:
    r"""Foreign text made safe for a terminal: characters that move the cursor or change direction
    are written as \x1b, \u202e.
    """
    return CONTROLS.sub(lambda match: _escaped(match[0]), str(text).replace("\r\n", "\n"))


def _escaped(letter: str) -> str:
    return f"\\x{ord(letter):02x}" if ord(letter) < 0x100 else f"\\u{ord(letter):04x}"


def shown(text: object) -> str:
    """Foreign text without secrets and control characters: for code that draws on a terminal
    itself.
    """
    return visible(hide(str(text)))


class SafeStream:
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
            keep = begun(whole)
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


def completed(then: str) -> str:
    """The commands in it with the config or run that was typed; without, they would be about the
    one in config.yaml.
    """
    typed = os.environ.get(TYPED, "")
    if not typed or len(typed) > LONGEST or re.search("(CONFIG|RUN|SET)=", then):
        return then
    return COMMANDS.sub(
        lambda command: command[0] + (typed if command[1] not in OF_NO_RUN else ""), then
    )


def _as_typed(text: str) -> str:
    """The text with commands as their user types them: `trainfleet train` where that is installed,
    and about the same config.
    """
    if "next: " in text:
        text = NEXT.sub(lambda line: completed(line[0]), text)
    command = os.environ.get("TRAINFLEET_COMMAND")
    if command != "trainfleet":
        return text
    return COMMANDS.sub(r"trainfleet \1", text).replace("make shows", "trainfleet --help shows")


def unguarded(stream: TextIO) -> TextIO:
    """The stream behind a guarded one: for code that moves the cursor itself, and passes foreign
    text through `shown`.
    """
    return stream._stream if isinstance(stream, SafeStream) else stream


def is_agreed(question: str) -> bool:
    """Whether the person at the terminal says yes; without a terminal nobody is asked, and the
    answer is no.
    """
    if not sys.stdin.isatty():
        return False
    # a guarded stream waits for the line's end
    unguarded(sys.stdout).write(shown(f"{question} [y/N] "))
    sys.stdout.flush()
    return input().strip().lower() in ("y", "yes")


def discard(stream: TextIO) -> None:
    """From now on what is written to a stream goes nowhere, and what it still holds too: whoever
    read it has left.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def install() -> None:
    """Guards this process's stdout and stderr until it ends, and has it print its Python stacks if
    native code crashes.
    """
    import atexit
    import faulthandler

    for number, name in enumerate(("stdin", "stdout", "stderr")):
        # closed by whoever started this: the next file that is opened must not take its place
        if getattr(sys, name) is None:
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
            # a terminal that knows ASCII alone gets a ? where others get a dot
            stream.reconfigure(errors="replace")
        setattr(sys, name, stream if isinstance(stream, SafeStream) else SafeStream(stream))
    try:
        yield
    finally:
        full = [error for name, stream in before.items() if (error := _ended(name, stream))]
        if full and not isinstance(sys.exception(), Exception):
            raise full[0]


def _ended(name: str, stream: TextIO) -> OSError | None:
    """Writes what a guarded stream still holds, and puts the stream itself back; the error where
    that does not fit on a disk.
    """
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
