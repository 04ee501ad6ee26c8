"""Displays one status line per host.

On a terminal, the lines are updated in place. Otherwise, each line is printed once its host is
finished.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..trust.safe_output import shown, unguarded
from .host_results import Host, names

if TYPE_CHECKING:
    from rich.text import Text

FINAL = ("ok", "changed", "FAILED")
STYLES = {"ok": "green", "changed": "yellow", "FAILED": "red"}


class Board:
    """Status of every host, for use as a context manager. `show` is thread-safe."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.rows: dict[Host, tuple[str, str]] = dict.fromkeys(hosts, ("...", ""))
        self.width = max((len(host.name) for host in hosts), default=0)
        self.stream = sys.stdout
        self.fancy = (
            self.stream.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        )
        self._lock = threading.Lock()

    def __enter__(self) -> Board:
        if self.fancy:
            from rich.console import Console
            from rich.live import Live

            self.console = Console(file=unguarded(self.stream), highlight=False)
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.fancy:
            self.live.update(self._draw(whole=True), refresh=True)
            self.live.stop()

    def show(self, host: Host, state: str, text: str = "") -> None:
        """Sets a host's state. A host in one of the FINAL states is finished."""
        with self._lock:
            self.rows[host] = (state, text)
            if self.fancy:
                self.live.update(self._draw(whole=False), refresh=True)
            elif state in FINAL:
                print(self._line(host), file=self.stream, flush=True)

    def show_all(self, hosts: Sequence[Host], state: str, text: str) -> None:
        """Sets the state of several hosts.

        Prints a single line for all of them if there is no terminal.
        """
        if self.fancy or len(hosts) == 1:
            for host in hosts:
                self.show(host, state, text)
            return
        with self._lock:
            self.rows |= dict.fromkeys(hosts, (state, text))
            print(
                shown(f"{names(hosts)}  {state}  {' '.join(text.splitlines())}"),
                file=self.stream,
                flush=True,
            )

    def in_state(self, *states: str) -> list[Host]:
        """Returns the hosts that are currently in one of the given states."""
        return [host for host, (state, _) in self.rows.items() if state in states]

    def say(self, text: str) -> None:
        """Prints a line that does not belong to a host."""
        with self._lock:
            print(shown(text), file=self.stream, flush=True)

    def _line(self, host: Host) -> str:
        state, text = self.rows[host]
        return shown(f"{host.name:{self.width}}  {state:8}  {' '.join(text.splitlines())}".rstrip())

    def _draw(self, *, whole: bool) -> Text:
        """Returns the lines to display.

        While hosts are unfinished, returns only as many lines as fit on the screen, unfinished
        hosts first.
        """
        from rich.text import Text

        hosts = list(self.rows)
        room = self.console.height - 2
        hidden = len(hosts) - room if len(hosts) > room and not whole else 0
        if hidden:
            hosts = sorted(hosts, key=lambda host: self.rows[host][0] in FINAL)[:room]
        lines = [
            Text(
                self._line(host),
                style=STYLES.get(self.rows[host][0], ""),
                no_wrap=True,
                overflow="ellipsis",
            )
            for host in hosts
        ]
        return Text("\n").join(
            [*lines, *([Text(f"... and {hidden} more", style="dim")] if hidden else [])]
        )
