"""The same exceptions as others print them: rich, IPython, loguru, a colourful Python, Windows, groups, a program's own wrappers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from verdict_cases import Case

from trainfleet.watch.lines import TRACEBACK, LogLine, parse

HEAD = f"{TRACEBACK}:"
FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (.+))?')
RULE = "-" * 75


@dataclass
class Frame:
    file: str
    number: int
    function: str
    source: str = ""


def python(frames: list[Frame], error: str) -> Iterator[str]:
    yield HEAD
    for at in frames:
        yield from (f'  File "{at.file}", line {at.number}, in {at.function}', f"    {at.source}")
    yield error


def coloured(frames: list[Frame], error: str) -> Iterator[str]:
    name, _, message = error.partition(": ")
    yield HEAD
    for at in frames:
        yield f'  File \x1b[35m"{at.file}"\x1b[0m, line \x1b[35m{at.number}\x1b[0m, in \x1b[35m{at.function}\x1b[0m'
        yield from (f"    \x1b[31m{at.source}\x1b[0m", "    \x1b[1;31m^^^^\x1b[0m")
    yield f"\x1b[1;35m{name}\x1b[0m" + (f": \x1b[35m{message}\x1b[0m" if message else "")


def rich(frames: list[Frame], error: str) -> Iterator[str]:
    yield f"╭{f' {TRACEBACK} ':─^78}╮"
    for at in frames:
        yield from (
            f"│ {at.file}:{at.number} in {at.function}".ljust(79) + "│",
            f"│ ❱ {at.number} │   {at.source}".ljust(79) + "│",
        )
    yield from (f"╰{'─' * 78}╯", error)


def ipython(frames: list[Frame], error: str) -> Iterator[str]:
    name = error.partition(":")[0].rpartition(".")[2]
    yield from (RULE, f"{name:42}{TRACEBACK}")
    for at in frames:
        yield from (
            f"File {at.file}:{at.number}, in {at.function}()",
            f"---> {at.number} {at.source}",
            "",
        )
    yield error


def loguru(frames: list[Frame], error: str) -> Iterator[str]:
    yield "2024-05-01 10:00:00.123 | ERROR    | __main__:<module>:12 - An error has been caught in function '<module>':"
    yield from (HEAD, "")
    for at in frames:
        yield from (
            f'> File "{at.file}", line {at.number}, in {at.function}',
            f"    {at.source}",
            "    │    └ <function main at 0x7f3>",
        )
    yield from ("", error)


def grouped(frames: list[Frame], error: str) -> Iterator[str]:
    yield f"  + Exception Group {HEAD}"
    yield from ('  |   File "/srv/launch.py", line 3, in <module>', "  |     asyncio.run(main())")
    yield from (
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
        "  +-+---------------- 1 ----------------",
    )
    yield from (f"    | {text}" for text in python(frames, error))
    yield "    +------------------------------------"


def windows(frames: list[Frame], error: str) -> Iterator[str]:
    yield from python([replace(at, file="C:" + at.file.replace("/", "\\")) for at in frames], error)


def wrapped(frames: list[Frame], error: str) -> Iterator[str]:
    yield from python(frames, error)
    yield from ("", "The above exception was the direct cause of the following exception:", "")
    yield from python(
        [Frame("/srv/run.py", 5, "main", 'raise RuntimeError("training failed") from error')],
        "RuntimeError: training failed",
    )


def in_cleanup(frames: list[Frame], error: str) -> Iterator[str]:
    """A handler that fails, too."""
    yield from python(frames, error)
    yield from ("", "During handling of the above exception, another exception occurred:", "")
    close = Frame("/srv/log.py", 9, "finish", "self.socket.close()")
    yield from python(
        [Frame("/srv/run.py", 5, "main", "logger.finish()"), close],
        "AttributeError: 'NoneType' object has no attribute 'close'",
    )


# Forms, and how many in a hundred of what is read in Python's own may be lost to each.
FORMS: dict[str, tuple[Callable[[list[Frame], str], Iterator[str]], float]] = {
    "coloured": (coloured, 0.0), "rich": (rich, 0.01), "ipython": (ipython, 0.02), "loguru": (loguru, 0.01), "a group": (grouped, 0.01),
    "windows": (windows, 0.01), "wrapped": (wrapped, 0.01), "in a handler's exception": (in_cleanup, 0.04),
}  # fmt: skip


def told(case: Case, form: Callable[[list[Frame], str], Iterator[str]]) -> Case:
    """A case with its tracebacks in that form."""
    lines, at = list[LogLine](), 0
    while at < len(case.lines):
        line, end = case.lines[at], at + 1
        if line.text == HEAD:
            while end < len(case.lines) and _goes_on(line, case.lines[end]):
                end += 1
            if end < len(case.lines) and re.match(r"[A-Za-z_][\w.]*(?::|$)", case.lines[end].text):
                last = case.lines[end]
                texts = form(_frames(case.lines[at + 1 : end]), last.text)
                lines += [
                    replace(last, text=read.text)
                    for text in texts
                    for read in parse([text], last.node)
                ]
                at = end + 1
                continue
        lines.append(line)
        at += 1
    return replace(case, lines=tuple(lines))


def _goes_on(head: LogLine, line: LogLine) -> bool:
    return (line.node, line.rank) == (head.node, head.rank) and line.text.startswith("  ")


def _frames(lines: tuple[LogLine, ...]) -> list[Frame]:
    frames = list[Frame]()
    for line in lines:
        if match := FRAME.search(line.text):
            frames.append(Frame(match[1], int(match[2]), match[3] or "<module>"))
        elif frames and not frames[-1].source:
            frames[-1].source = line.text.strip()
    return frames
