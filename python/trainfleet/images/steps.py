"""What a builder writes, as a user reads it: a line a step, what it says below, and for how long the one runs that runs now."""

from __future__ import annotations

import queue
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from ..output import shown
from ..report.history import duration
from ..report.live import Shown

# buildah and podman: "[8/8] STEP 7/23: RUN ..."; docker --progress=plain: "#9 [image 7/23] RUN ..."
STEP = re.compile(r"(?:\[\d+/\d+\] )?STEP (\d+/\d+): (.+)|#\d+ \[(?:[\w-]+ )?(\d+/\d+)\] (.+)")
CACHED = re.compile(r"--> Using cache|#\d+ CACHED")
NOISE = re.compile(
    r"--> [0-9a-f]+$|#\d+ (?:DONE|\[internal\]|\[auth\]|resolve |transferring |sha256:|extracting |exporting |naming |writing )"
    r"|(?:\[\d+/\d+\] )?COMMIT |Successfully tagged |[0-9a-f]{64}$|#\d+$|$"
)
AT_WORK = re.compile(r"FROM (?![0-9a-f]{64})|COPY|RUN")  # instructions that may take time; others change the configuration alone
WIDTH = 66  # letters of a step's line
PACE = 0.2  # seconds between two drawings of the time
TOLD = 2.0  # seconds from which on the time of a step is told


class Steps(Shown):
    """A builder's command from `with` to its end. `what` it does is told on a terminal while no step runs."""

    def __init__(self, builder: str, what: str, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self.builder, self.what, self.step = builder, what, ""
        if self.line.fancy:
            self.line.area.transient = True

    def take(self, text: str) -> None:
        """One line that the builder has written."""
        if match := STEP.match(text):
            self.end()
            number, instruction = (part for part in match.groups() if part)
            if AT_WORK.match(instruction):
                self.step, self.started = f"  {number:>5} {_short(shown(instruction))}", time.monotonic()
        elif CACHED.match(text):
            self.end("  (from the cache)")
        elif not NOISE.match(text):
            self.update()
            self.line.say(f"  {self.builder} | {shown(text)}")

    def update(self, waits_for: str = "") -> None:
        """Draws how long the step runs; elsewhere than on a terminal says once that it does."""
        if self.step or self.line.fancy:
            self.line.wait(self.step or self.what, time.monotonic() - self.started)

    def end(self, how: str = "") -> None:
        """The step has ended; on a terminal its line stays, with its seconds."""
        seconds = time.monotonic() - self.started
        if self.step and (how or self.line.fancy):
            self.line.say(self.step + (how or (f"  {duration(int(seconds))}" if seconds > TOLD else "")))
        elif self.step:
            self.update()
        self.step = ""


def lines_of(process: subprocess.Popen[str], steps: Steps) -> Iterator[str]:
    """Each line of a process's output; `steps` are drawn meanwhile."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=PACE)
        except queue.Empty:
            steps.update()
            continue
        if line is None:
            return
        yield line


def _short(text: str) -> str:
    """The text on one line, without the options of RUN, cut where it would be long."""
    text = re.sub(r" --mount=\S+", "", " ".join(text.split()))
    return text if len(text) < WIDTH else f"{text[: WIDTH - 4]} ..."
