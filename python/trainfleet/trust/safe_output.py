"""Redacts secrets and escapes control characters in everything a process prints.

Imports only the standard library, because supervisors load this module at startup.
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

from .redaction import hide

COMMANDS = re.compile(  # `make` commands in a message
    r"\bmake "
    r"(setup|doctor|recipes|config|plan|tokenize|train|profile|scaling|sweep|rehearse|inspect|sample|chat|status|logs|explain|stop"
    r"|new-backend|image|checkpoints|verify|eval|export|report|clean|build|push|ls|runs|compare|compile|watch)\b"
)
# Environment variable that the CLI sets to the CONFIG=, RUN=, SET= and NODES= arguments that the
# user typed.
TYPED = "TRAINFLEET_TYPED"
LONGEST = 500  # maximum length of typed arguments to repeat in a suggested command
# Commands that accept NODES.
SIZED = ("setup", "doctor", "plan", "tokenize", "compile", "train", "profile", "sweep")
ACTING = (*SIZED, "scaling", "rehearse", "build", "push", "image")
OF_NO_RUN = ("config", "recipes", "runs", "compare", "explain", "ls", "new-backend")
SIZE = re.compile(r"\bfleet\.nodes=[0-9]* ?")
NEXT = re.compile(r"^ *next: .*", re.MULTILINE)
# Control characters except newline and tab, characters that change the text direction, and Unicode
# line separators.
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]"
)


def visible(text: object) -> str:
    r"""Escapes characters that move the cursor or change the text direction, such as \x1b and
    \u202e.
    """

    def escaped(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

    return CONTROLS.sub(escaped, str(text).replace("\r\n", "\n"))


def shown(text: object) -> str:
    """Redacts secrets and escapes control characters, for code that bypasses SafeStream."""
    return visible(hide(str(text)))


class SafeStream:
    """Text stream that redacts secrets and escapes control characters.

    Holds back an unfinished line, because the rest of a secret may follow in the next write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._held, self._turn = stream, "", threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes the complete lines, including the text that was held back."""
        with self._turn:
            lines, end, self._held = (self._held + text).rpartition("\n")
            self._stream.write(_as_typed(shown(lines + end)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stream.flush()

    def release(self) -> None:
        """Writes any text that is still held back."""
        with self._turn:
            held, self._held = self._held, ""
            self._stream.write(shown(held))
            self._stream.flush()


def completed(then: str) -> str:
    """Adds the arguments that the user typed to the `make` commands in a message.

    Each command gets only the arguments that it accepts. Otherwise, the suggested command would use
    config.yaml and its values.
    """
    typed = os.environ.get(TYPED, "")
    if not typed or len(typed) > LONGEST or re.search("(CONFIG|RUN|SET)=", then):
        return then
    if "NODES=" in then:  # can't be combined with fleet.nodes
        typed = SIZE.sub("", typed)
    words = [word.partition("=") for word in shlex.split(typed)]

    def repeated(command: re.Match[str]) -> str:
        kept = (
            f" {name}={shlex.quote(value)}"
            for name, _, value in words
            if _takes(command[1], name, value) and f"{name}=" not in then
        )
        return command[0] + "".join(kept)

    return COMMANDS.sub(repeated, then)


def _takes(verb: str, name: str, value: str) -> bool:
    """Returns whether a command accepts this typed argument.

    A SET that may change the run's name is accepted by every command that needs a run.
    """
    if name == "NODES":
        return verb in SIZED
    if name == "SET" and "name" not in value:
        return verb in ACTING
    return verb not in OF_NO_RUN


def _as_typed(text: str) -> str:
    """Rewrites the commands in a text the way the user would type them.

    The typed arguments are added after `next:`, and `make` becomes `trainfleet` if the user ran
    `trainfleet`.
    """
    if "next: " in text:
        text = NEXT.sub(lambda line: completed(line[0]), text)
    command = os.environ.get("TRAINFLEET_COMMAND")
    if command != "trainfleet":
        return text
    return COMMANDS.sub(r"trainfleet \1", text).replace("make shows", "trainfleet --help shows")


def unguarded(stream: TextIO) -> TextIO:
    """Returns the stream that a SafeStream wraps, for callers that move the cursor.

    These callers must pass external text through `shown`.
    """
    return stream._stream if isinstance(stream, SafeStream) else stream


def show_at_once(text: object) -> None:
    """Prints text without a newline, which a SafeStream would hold back. A secret that is split
    across calls is not redacted.
    """
    print(shown(text), end="", flush=True, file=unguarded(sys.stdout))


def is_agreed(question: str) -> bool:
    """Asks the user a yes/no question on the terminal. Returns False without a terminal."""
    if not sys.stdin.isatty():
        return False
    show_at_once(f"{question} [y/N] ")
    return input().strip().lower() in ("y", "yes")


def discard(stream: TextIO) -> None:
    """Sends a stream's buffered and future output to /dev/null, because its reader has exited."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def run_program(main: Callable[[list[str]], int]) -> NoReturn:
    """Runs `main` on the command-line arguments with guarded output, and exits with its code."""
    install()
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # the reader closed the pipe early, as `head` does
        os._exit(0)


def install() -> None:
    """Wraps stdout and stderr in SafeStream until the process exits, and enables tracebacks for
    crashes in native code.
    """
    import atexit
    import faulthandler

    for number, name in enumerate(("stdin", "stdout", "stderr")):
        # The parent process closed this descriptor. Reopen it, or the next opened file would get
        # its number.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
    faulthandler.enable(sys.stderr)
    guard = guarded()
    guard.__enter__()
    atexit.register(guard.__exit__, None, None, None)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Wraps stdout and stderr in SafeStream inside the `with` block. Writes held-back text at the
    end.
    """
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in before.items():
        if hasattr(stream, "reconfigure"):
            # Flush each line, even to a pipe. Print ? for characters that the terminal's encoding
            # can't represent, instead of failing.
            errors = "replace" if stream.errors == "strict" else stream.errors
            stream.reconfigure(line_buffering=True, errors=errors)
        setattr(sys, name, stream if isinstance(stream, SafeStream) else SafeStream(stream))
    try:
        yield
    finally:
        full = [error for name, stream in before.items() if (error := _ended(name, stream))]
        if full and not isinstance(sys.exception(), Exception):
            raise full[0]


def _ended(name: str, stream: TextIO) -> OSError | None:
    """Flushes a SafeStream and restores the original stream. Returns the write error, if any."""
    full = None
    try:
        getattr(sys, name).release()
    except ValueError:
        pass  # the stream is already closed
    except OSError as error:
        # a closed pipe is not an error
        full = None if isinstance(error, BrokenPipeError) else error
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            # Python flushes again at exit; send that output to /dev/null.
            os.dup2(nowhere.fileno(), stream.fileno())
    setattr(sys, name, stream)
    return full
