"""Parser for the tracebacks in a process's output."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from .lines import TRACEBACK, LogLine, is_progress

# Maximum number of lines, and of seconds, for which an exception's message may continue.
MESSAGE_LINES, MESSAGE_SECONDS = (16, 1.5)
CHAINS = 16  # maximum number of chains to keep per process; the last ones are kept
FRAMES = 8  # maximum number of frames to keep per traceback; the innermost ones are kept
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_IN_THREAD = "Exception in thread"
_FRAME = "│╭╰❱|+"  # borders of rich's boxes and exception groups
_POINTED = re.compile(r"-+> ?\d+(?: |$)|-{20}")  # IPython's arrow to the line that failed
_BARE = re.compile(
    r"(?:error: )?(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*"
    r"(?:Error|Exception|Interrupt|Exit|Failure|Fault|Invalid|Expired)\b"
    r"(?: \(see above for traceback\))?(?: *$|:)|\w+\(\): |Fatal Python error: "
    r"|(?:[Ee]rror|Exception): (?!Err|Image)|(?:\w+\.)+(?:exc|errors|exceptions)\.[A-Z]\w+: "
)
# traceback frame without a preceding header
_HEADLESS = re.compile(r'\s+File "[^"]+", line \d+, in \S+$')
# torch.distributed.checkpoint: header of another rank's traceback
_OF_RANK = re.compile(r"\): \(RANK (\d+)\)")
_FLAT = re.compile(
    r'File "[^"]+", line \d+, in (?:(?!File '
    r'").)*?\s((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit): (?:(?!File ").)*)$'
)
_LAUNCHER = re.compile(
    r"(?:srun|slurmstepd|sbatch|mpirun\S*|prterun|orterun|kubelet): |[IWEF]\d{4} \d\d:"
    r"|(?:ERROR|WARNING|INFO):(?:torch|composer)\.|torch\.distributed\.elastic\S*: "
    r"|\[[\d-]{10} [\d:,]+ [EW] \d+ \d+\] \(raylet"
)
_FOREIGN = re.compile(  # final messages from runtimes other than Python: C++, Rust, Go, Java, glog
    r"(?P<head>terminate called (?:after|recurs)|libc\+\+abi: terminating|thread '.*' (?:\(\d+\) "
    r")?panicked at |panic: )"
    r'|Exception in thread "[^"]*" (?P<java>(?:[a-z_]\w*\.)+[A-Z][\w$]*)|Caused by: '
    r"(?P<root>(?:[a-z_]\w*\.)+[A-Z][\w$]*(?=: |$))"
    r"|(?:[\d-]+ [\d:.]+: )?F(?:\d{4,8} [\d:.]+ +\d+)? ?[\w/.+-]+\.(?:cc|cpp|cu|h|hpp):\d+\] "
    r"(?P<check>.)"
)
# Messages that indicate a bug unless another message explains the failure.
_PANIC = re.compile(
    r"thread '.*' (?:\(\d+\) )?panicked at |panic: |Check failed: |\w*\.?PanicException: "
)
# interleaved output from several ranks
_WOVEN = re.compile(r"^(\s*)([\w.]*?(?:Error|Exception))(?:(?:: )?\2)+(?:: ?)*")
_DOTTED = re.compile(r"(?:[a-z_]\w*\.)+[A-Z]\w*: ")
# frame format of Python, IPython (`File x.py:3, in f()`, `~/x.py in f()`) or rich (`x.py:3 in f`)
_IN = re.compile(
    r'(?:> )?File "([^"]+)", line \d+(?:, in (\S+))?|File (\S+?):\d+, in '
    r"([\w.<>]+)|(?:Cell|Input) In ?\[\d+\]"
    r"|((?:[~/]|[A-Z]:\\)\S*?|<ipython-\S+>)(?::\d+)? in\b ?([\w.<>]*)"
)
_NESTED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ")
# package folders of an interpreter
_HOME = re.compile(r"^.*(?=/(?:site|dist)-packages/)|^.*/lib(?:64)?/python[\d.]+(?=/\w)")
_NAME = re.compile(r"(?:error: )?((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)")
BUGS = frozenset(
    {  # exceptions that count as bugs, whatever their message
        "AttributeError",
        "IndentationError",
        "IndexError",
        "KeyError",
        "NameError",
        "RecursionError",
        "SyntaxError",
        "TabError",
        "TypeError",
        "UnboundLocalError",
        "UnicodeEncodeError",
        "ZeroDivisionError",
    }
)
PROGRAM = BUGS | {"ImportError", "NotImplementedError", "StopIteration", "StopAsyncIteration"}


@dataclass
class PrintedException:
    """An exception in a log: its line, the line's index within its node's lines, and its multi-line
    message.

    `bare` means printed without a traceback. `aside` means raised in a destructor or thread, which
    does not end the process.
    """

    line: LogLine
    index: int
    message: list[str]
    bare: bool = False
    aside: bool = False
    frames: str = ""  # files and functions, innermost last
    source: str = ""  # source line of the innermost frame, if printed
    rank: str = ""  # another rank that raised it, according to the traceback's header

    @property
    def text(self) -> str:
        return "\n".join(self.message)

    @property
    def panicked(self) -> bool:
        """Returns whether the program aborted because an internal check failed."""
        return _PANIC.match(self.message[0]) is not None

    @property
    def inner(self) -> str:
        """Returns the message starting at the last exception that it quotes, or "" if it quotes no
        exception. Wrappers quote exceptions, for example as `X raised:` followed by `RuntimeError:
        ...`.
        """
        last = max(
            (index for index, line in enumerate(self.message) if index and _NESTED.match(line)),
            default=0,
        )
        return "\n".join(self.message[last:]) if last else ""

    @property
    def where(self) -> str:
        """Returns the innermost frame, followed by the exception's qualified class name as a
        path.
        """
        match = _NAME.match(self.message[0])
        frame = _HOME.sub("", self.frames.rpartition("\n")[2])
        return "\n".join([frame, match[1].replace(".", "/") if match and "." in match[1] else ""])

    @property
    def name(self) -> str:
        """Returns the exception's class name without its module."""
        match = _NAME.match(self.message[0])
        return match[1].rpartition(".")[2] if match else ""


@dataclass
class Tracebacks:
    """Incremental parser for one process's lines. Each chain contains one failure's exceptions, the
    most likely root first.
    """

    chains: deque[list[PrintedException]] = field(default_factory=lambda: deque(maxlen=CHAINS))
    base: int | None = None  # indentation of the open traceback's header
    last: PrintedException | None = None  # exception whose message may continue
    # how the next traceback relates to the last one: "chained", "original" or ""
    link: str = ""
    aside: bool = False
    dropped: bool = False  # whether Python ignored the open traceback's exception
    # whether the open traceback has no header, so it may not be an exception
    headless: bool = False
    frames: deque[str] = field(default_factory=lambda: deque(maxlen=FRAMES))
    source: str = ""
    rank: str = ""

    def take(self, line: LogLine, index: int, text: str) -> bool:
        """Parses a line. Returns whether it is part of a traceback or an exception's message."""
        if text.count("Error") > 1:
            text = _WOVEN.sub(r"\1\2: ", text)
        if TRACEBACK in text:
            return self._begin(line, index, text)
        if self.base is not None:
            return self._inside(line, index, text)
        if text.startswith(_CHAINED):
            self.link = "chained"
            return True
        if text.startswith(("Exception ignored in", _IN_THREAD, "Error in atexit")):
            self.aside = True
            self.dropped = not text.startswith(_IN_THREAD)
            self.last = None
            return True
        stripped = text.strip()
        if self._is_foreign(line, index, stripped) or self._goes_on(line, text):
            return True
        if _BARE.match(stripped):
            self._add(PrintedException(line, index, [stripped], bare=True))
            return True
        if _HEADLESS.match(text):
            self._open("")
            self.headless = True
            return self._inside(line, index, text)
        return False

    def _begin(self, line: LogLine, index: int, text: str) -> bool:
        """Parses a line with a traceback's header, or with a whole traceback as in JSON logs."""
        head, *pieces = text[text.index(TRACEBACK) :].split("\\n") if "\\n" in text else [text]
        self._open(head)
        if not pieces and (flat := _FLAT.search(head)):
            pieces = [flat[1]]
        for piece in pieces:
            if re.search(r"\w", piece):
                self.take(line, index, piece)
        return True

    def _is_foreign(self, line: LogLine, index: int, text: str) -> bool:
        """Returns whether the line is a final message from a non-Python runtime. If so, adds it."""
        if not (match := _FOREIGN.match(text)):
            return False
        self.link = "original" if match["root"] and self.last else ""
        self._add(PrintedException(line, index, [text[match.start(match.lastgroup or 0) :]]))
        return True

    def _open(self, text: str) -> None:
        self.frames.clear()
        self.source = ""
        self.headless = False
        self.rank = match[1] if (match := _OF_RANK.search(text)) else ""
        before = text.partition(TRACEBACK)[0]
        self.base = (
            len(before) - len(before.lstrip())
            if not before.strip(" +|") or "traceback :" in before
            else 0
        )
        if before.strip() == "Original":
            self.link = "original"

    def _inside(self, line: LogLine, index: int, text: str) -> bool:
        """Parses a line after a traceback's header, which is either a frame or the exception."""
        stripped = text.strip()
        indent = len(text) - len(text.lstrip())
        frame = _IN.match(stripped.lstrip("│|+ "))
        inner = frame or _POINTED.match(stripped)
        if inner or indent > (self.base or 0) or stripped[:1] in _FRAME[:4]:  # or an empty line
            if frame:
                self.frames.append(" ".join(filter(None, frame.groups())).replace("\\", "/"))
                self.source = ""
            elif stripped.strip("^~ "):
                self.source = stripped
            return True
        self.base = None
        if not self._ends(stripped):
            return False
        if not self.dropped:
            said = [stripped.lstrip("|+ ")]
            seen = "\n".join(self.frames), self.source, self.rank
            self._add(PrintedException(line, index, said, False, self.aside, *seen))
        self.aside = self.dropped = False
        return True

    def _ends(self, text: str) -> bool:
        """Returns whether the line after a traceback's frames is the exception."""
        headless, self.headless = self.headless, False
        named = _BARE.match(text) or _DOTTED.match(text)
        return bool(named if headless else re.search(r"\w", text))

    def _add(self, block: PrintedException) -> None:
        if self.link and self.chains:
            chain = self.chains[-1]
            chain.insert(0, block) if self.link == "original" else chain.append(block)
        else:
            self.chains.append([block])
        self.last = block
        self.link = ""

    def _goes_on(self, line: LogLine, text: str) -> bool:
        """Returns whether the line continues the last exception's message. If so, appends it."""
        block = self.last
        if (
            block is None
            or len(block.message) > MESSAGE_LINES
            or abs(line.time - block.line.time) > MESSAGE_SECONDS
        ):
            self.last = None
            return False
        if is_progress(text) or _LAUNCHER.match(text):
            return False
        if text.strip():
            block.message.append(text.strip())
        return True
