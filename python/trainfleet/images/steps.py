"""Shows a builder's output: a line a step, with its seconds or that it was cached, and its messages."""

from __future__ import annotations

import re
import sys
import time

from ..trust.safe_output import shown, unguarded

# buildah and podman: "[8/8] STEP 7/23: RUN ..."; docker --progress=plain: "#9 [image 7/23] RUN ..."
STEP = re.compile(r"(?:\[\d+/\d+\] )?STEP (\d+/\d+): (.+)|#\d+ \[(?:[\w-]+ )?(\d+/\d+)\] (.+)")
CACHED = re.compile(r"--> Using cache|#\d+ CACHED")
NOISE = re.compile(
    r"--> [0-9a-f]+$|#\d+ (?:DONE|\[internal\]|\[auth\]|resolve |transferring |sha256:|extracting |exporting |naming |writing )"
    r"|(?:\[\d+/\d+\] )?COMMIT |Successfully tagged |[0-9a-f]{64}$|#\d+$|$"
)
AT_WORK = re.compile(r"FROM (?![0-9a-f]{64})|COPY|RUN")  # instructions that may take time; others change the configuration alone
WIDTH = 66  # letters of an instruction
NEWLINE = "\n"
LONG = 1.0  # seconds from which on the time of a step is shown


class BuildSteps:
    """The lines of one builder's command. The line of the step that runs stays open until the step ends or says something."""

    def __init__(self, builder: str) -> None:
        self.builder, self.runs, self.open, self.began = builder, False, False, 0.0

    def take(self, text: str) -> None:
        """One line that the builder has written."""
        if match := STEP.match(text):
            self.end()
            number, instruction = (part for part in match.groups() if part)
            if AT_WORK.match(instruction):
                print(f"  {number:>5} {short(shown(instruction))}", end="", file=unguarded(sys.stdout), flush=True)
                self.runs, self.open, self.began = True, True, time.monotonic()
        elif CACHED.match(text):
            self.end("(from the cache)")
        elif not NOISE.match(text):
            print(f"{NEWLINE if self.open else ''}  {self.builder} | {shown(text)}", flush=True)
            self.open = False

    def end(self, how: str = "") -> None:
        """Says how the step that runs has ended, or how long it took."""
        seconds = time.monotonic() - self.began
        outcome = how or (f"{seconds:.0f} s" if seconds > LONG else "")
        if self.runs and (self.open or outcome):
            print(f"  {outcome}".rstrip() if self.open else f"{'':8}{outcome}", flush=True)
        self.runs = self.open = False


def short(text: str) -> str:
    """The text on one line, without the options of RUN, cut where it would be long."""
    text = re.sub(r" --mount=\S+", "", " ".join(text.split()))
    return text if len(text) < WIDTH else f"{text[: WIDTH - 4]} ..."
