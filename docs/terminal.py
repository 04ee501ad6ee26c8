"""Runs commands in a pseudo-terminal and renders its final contents as an SVG.

In a new checkout:

    python docs/terminal.py docs/first-run.svg 'make train' "make sample PROMPT='There once was'"

Next to the README's config:

    python docs/terminal.py docs/plan.svg 'make plan'
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from struct import pack

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS, ROWS = 116, 400
CODES = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b[^\[]|.", re.DOTALL)


class Screen:
    """Lines of a terminal, with their color codes. Supports only the cursor movements that a live
    line uses.
    """

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, str]]] = [[]]  # (style, character) pairs
        self.row = self.column = 0
        self.style = ""

    def write(self, text: str) -> None:
        for found in CODES.finditer(text):
            if found[2]:
                self._obey(found[1], found[2])
            elif found[0] == "\n":
                self.row += 1
                self.lines += [[] for _ in range(self.row - len(self.lines) + 1)]
            elif found[0] == "\r":
                self.column = 0
            elif found[0].isprintable():
                line = self.lines[self.row]
                line += [("", " ")] * (self.column - len(line) + 1)
                line[self.column] = self.style, found[0]
                self.column += 1

    def _obey(self, numbers: str, code: str) -> None:
        if code == "A":
            self.row = max(0, self.row - int(numbers or 1))
        elif code == "K":
            del self.lines[self.row][0 if numbers == "2" else self.column :]
        elif code == "m":
            self.style = "" if numbers in ("", "0") else f"{self.style}\x1b[{numbers}m"


def typed(command: str) -> Iterator[str]:
    """Runs a command and yields the lines that the terminal shows once it has ended."""
    screen = Screen()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    with subprocess.Popen(
        command, shell=True, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        said = b"".join(_read(ours))
    if process.returncode:
        sys.exit(f"error: {command} ended with {process.returncode}")
    screen.write(said.decode(errors="replace"))
    yield f"\x1b[1m$ {command}\x1b[0m"
    for line in screen.lines:
        parts = (
            "".join(letter for _, letter in part).join((style, "\x1b[0m" if style else ""))
            for style, part in groupby(line, itemgetter(0))
        )
        yield "".join(parts).rstrip()


def _read(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(terminal, 4096)
        except OSError:  # the last writer has exited
            return


def draw(lines: list[str]) -> str:
    """Renders the lines as an SVG without web fonts."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    for line in lines:
        console.print(Text.from_ansi(line), overflow="fold")
    image = console.export_svg(title="trainfleet", theme=MONOKAI, unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\s*", "", image, flags=re.DOTALL).replace(
        "Fira Code, monospace", "monospace"
    )


def main(path: str, *commands: str) -> None:
    lines = [line for command in commands for line in (*typed(command), "")]
    text = re.sub(r"\n\n\n+", "\n\n", "\n".join(lines)).strip()
    Path(path).write_text(draw(text.split("\n")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
