"""Guards a process's output: hides secrets (trust/redaction.py), and makes control characters in
foreign text visible.

Standard library only: supervisors start with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TextIO

from .redaction import begun, hide

COMMANDS = re.compile(  # commands of our Makefile, anywhere in a text
    r"\bmake "
    r"(setup|doctor|recipes|config|plan|tokenize|train|profile|scaling|rehearse|inspect|sample|status|logs|explain|stop"
    r"|new-backend|image|checkpoints|verify|eval|export|report|clean|build|push|ls|runs|compare|compile|watch)\b"
)
# words of the command that name its config and run, and those that change their values (cli)
TYPED = "TRAINFLEET_TYPED"
LONGEST = 500  # characters that a next command copies from the typed one
# the commands that act on values, so that they need SET; and those that take NODES too
SIZED = ("setup", "doctor", "plan", "tokenize", "compile", "train", "profile")
ACTING = (*SIZED, "scaling", "rehearse", "build", "push", "image")
OF_NO_RUN = ("config", "recipes", "runs", "compare", "explain", "ls", "new-backend")
NEXT = re.compile(r"^ *next: .*", re.MULTILINE)
# Control characters except newline and tab; characters that change the direction of text; Unicode
# line separators.
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]"
)


def visible(text: object) -> str:
    r"""Makes foreign text safe for a terminal: characters that move the cursor or change direction
    become \x1b, \u202e.
    """
    return CONTROLS.sub(lambda match: _escaped(match[0]), str(text).replace("\r\n", "\n"))


def _escaped(letter: str) -> str:
    return f"\\x{ord(letter):02x}" if ord(letter) < 0x100 else f"\\u{ord(letter):04x}"


def shown(text: object) -> str:
    """Returns foreign text without secrets and control characters, for code that draws on a
    terminal.
    """
    return visible(hide(str(text)))


class SafeStream:
    """A text stream that hides secrets and makes control characters visible.

    A secret may be split over several writes, so text that may begin one is held back.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._held, self._turn = stream, "", threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the text, and holds back the end that may begin a secret."""
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
        """Writes the text that was held back and turned out not to be a secret."""
        with self._turn:
            held, self._held = self._held, ""
            self._stream.write(shown(held))
            self._stream.flush()


def completed(then: str) -> str:
    """Adds the typed config or run to the commands in it, and the typed values to those that act on
    them; without them they would mean those in config.yaml.
    """
    typed = os.environ.get(TYPED, "")
    if not typed or len(typed) > LONGEST or re.search("(CONFIG|RUN|SET)=", then):
        return then
    words = [word.partition("=") for word in shlex.split(typed)]

    def repeated(command: re.Match[str]) -> str:
        kept = [
            f" {name}={shlex.quote(value)}"
            for name, _, value in words
            if name == "CONFIG"
            or (name == "SET" and (command[1] in ACTING or "name" in value))
            or (name == "NODES" and command[1] in SIZED and "NODES=" not in then)
        ]
        return command[0] + ("" if command[1] in OF_NO_RUN else "".join(kept))

    return COMMANDS.sub(repeated, then)


def _as_typed(text: str) -> str:
    """Writes commands the way their user types them, `trainfleet train` if that is installed, and
    with the same config.
    """
    if "next: " in text:
        text = NEXT.sub(lambda line: completed(line[0]), text)
    command = os.environ.get("TRAINFLEET_COMMAND")
    if command != "trainfleet":
        return text
    return COMMANDS.sub(r"trainfleet \1", text).replace("make shows", "trainfleet --help shows")


def unguarded(stream: TextIO) -> TextIO:
    """Returns the stream behind a guarded one, for code that moves the cursor and passes foreign
    text through `shown`.
    """
    return stream._stream if isinstance(stream, SafeStream) else stream


def is_agreed(question: str) -> bool:
    """Asks the person at the terminal, and tells whether they agree. Without a terminal the answer
    is no.
    """
    if not sys.stdin.isatty():
        return False
    # a guarded stream waits for the line's end
    unguarded(sys.stdout).write(shown(f"{question} [y/N] "))
    sys.stdout.flush()
    return input().strip().lower() in ("y", "yes")


def discard(stream: TextIO) -> None:
    """Discards later output to a stream, and its buffer too: its reader has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def run_program(main: Callable[[list[str]], int]) -> NoReturn:
    """Runs a module's main() on its arguments with guarded output, and exits with its code."""
    install()
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # the reader has read enough, like `head`
        os._exit(0)


def install() -> None:
    """Guards this process's stdout and stderr until it ends. Also prints its Python stacks if
    native code crashes.
    """
    import atexit
    import faulthandler

    for number, name in enumerate(("stdin", "stdout", "stderr")):
        # the parent process closed it: the next opened file must not take its place
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
    faulthandler.enable(sys.stderr)
    guard = guarded()
    guard.__enter__()
    atexit.register(guard.__exit__, None, None, None)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Guards stdout and stderr within `with`, and flushes held-back text at its end."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in before.items():
        if getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
            # an ASCII terminal gets a ? for a dot
            stream.reconfigure(errors="replace")
        setattr(sys, name, stream if isinstance(stream, SafeStream) else SafeStream(stream))
    try:
        yield
    finally:
        full = [error for name, stream in before.items() if (error := _ended(name, stream))]
        if full and not isinstance(sys.exception(), Exception):
            raise full[0]


def _ended(name: str, stream: TextIO) -> OSError | None:
    """Writes the rest of a guarded stream, and restores the original one. Returns the error if the
    disk is full.
    """
    full = None
    try:
        getattr(sys, name).release()
    except ValueError:
        pass  # it is closed
    except OSError as error:
        full = None if isinstance(error, BrokenPipeError) else error  # its reader has left
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())  # otherwise Python tries again when it ends
    setattr(sys, name, stream)
    return full
