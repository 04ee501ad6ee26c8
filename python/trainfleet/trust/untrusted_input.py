"""The one checked way in for text that was written elsewhere: by a user, a node, another program,
an earlier run.

Reads only regular files of a bounded size, as UTF-8. JSON is bounded in depth, and its strings in
content. Anything else is an InputError with file and line. FileNotFoundError is left to the caller.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shlex
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from .errors import InputError
from .file_signatures import kind_of

KIBIBYTE, MEBIBYTE = 2**10, 2**20
RECORD = 16 * MEBIBYTE  # bytes of results.json and similar files
LINE = MEBIBYTE  # bytes per line of events or metrics
DEEPEST = 32  # nested objects and lists; trainfleet writes at most six
LARGEST_COUNT = 10**18  # largest number accepted from untrusted input
SHOWN = 60  # characters of a wrong value in a message
_SEALED = set[Path]()
_HOME: list[str] = []  # the working folder of a process that enters it again
IN_THE_WAY = "a link, a file or a device is where the file or its folder belongs"
# flags to pass through a folder: listing it may be forbidden
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_LOOK = "run ls -l on its path"
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # half of a surrogate pair
MISTAKEN = (  # text of a file of another kind → its kind
    (
        r"\A\s*version https://git-lfs",
        "is a pointer of Git LFS, not the file: git lfs pull",
    ),
    (
        r"\A\s*<(!DOCTYPE html|html|head|body)",
        "is a web page: the file was not downloaded",
    ),
    (r"\A\s*<(\?xml|Error>)", "is XML"),
    (r"^(<<<<<<<|>>>>>>>) ", "has an unresolved merge conflict"),
)
# templates in a config; JSON holds some, for chats
TEMPLATE = (r"\{\{[^{}\n\"']{0,80}\}\}|\{%", "is a template that has not been filled in")
# first bytes of a compressed file → its suffix
PACKED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
# bytes of a text in Latin letters
PLAIN = bytes({*range(32, 127), *range(160, 256), 9, 10, 13})
# characters that make a line look like another one
_BIDIRECTIONAL = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def seal(folder: Path) -> None:
    """Stops following links below `folder` from now on: it is a run's, and another user may have
    made them. The folder itself may be a link.
    """
    _SEALED.update((folder, folder.absolute()))


def stay() -> None:
    """Makes this process enter its working folder again from now on if that becomes stale. For
    ranks, which have no successor.
    """
    _HOME[:] = [str(Path.cwd())]


def is_sealed(path: Path) -> bool:
    """Tells whether a file is below a sealed folder."""
    return not _SEALED.isdisjoint(path.parents)


@contextlib.contextmanager
def folder_of(path: Path, *, make: bool = False) -> Iterator[tuple[int | None, Path]]:
    """Opens the folder of a file in a sealed folder, and returns it with the file's name in it;
    (None, the path) for any other file.

    `make`: creates missing folders. Raises OSError with ELOOP or ENOTDIR if one is a link.
    """
    root = next((one for one in reversed(path.parents) if one in _SEALED), None)
    if root is None:
        yield None, path
        return
    *inner, last = path.relative_to(root).parts
    if ".." in (*inner, last):
        raise OSError(errno.ELOOP, "it leads out of its folder")
    with contextlib.ExitStack() as opened:
        folder = _open_root(root)
        opened.callback(os.close, folder)
        for part in inner:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            folder = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            opened.callback(os.close, folder)
        yield folder, Path(last)


def _open_root(root: Path) -> int:
    """Opens a sealed folder. If a file server was mounted again, open folders are stale, including
    the working folder: this enters it again by its name.
    """
    try:
        return os.open(root, _FOLDER)
    except OSError as error:
        if error.errno != errno.ESTALE or not _HOME:
            raise
        os.chdir(_HOME[0])
        return os.open(root, _FOLDER)


def opener(path: str, flags: int) -> int:
    """Opens a file for `open(path, mode, opener=untrusted_input.opener)`: like os.open, but through
    no link of a sealed folder.

    Raises OSError with ELOOP if the file is a link, or ENOTDIR if a folder on the way is.
    """
    with folder_of(Path(path)) as (folder, name):
        linked = 0 if folder is None else os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOCTTY | linked, 0o666, dir_fd=folder)


def open_regular(path: Path) -> BinaryIO:
    """Opens a stream over a regular file. Refuses files that could block a reader: a pipe, a
    device, a socket.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: it is not a regular file, is reached through a link in a sealed folder, or can't
            be opened.
    """
    try:
        with folder_of(path) as (folder, name):
            _require_regular(path, os.stat(name, dir_fd=folder, follow_symlinks=folder is None))
            linked = 0 if folder is None else os.O_NOFOLLOW
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | linked
            stream = os.fdopen(os.open(name, flags, dir_fd=folder), "rb")
        _require_regular(path, os.fstat(stream.fileno()))  # it may have been replaced in between
    except (FileNotFoundError, InputError):
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if is_in_the_way(error):
            raise InputError(f"can't be read: {IN_THE_WAY}", where=str(path), next=_LOOK) from error
        raise unreadable(path, error) from error
    return stream


def is_in_the_way(error: Exception) -> bool:
    """Tells whether a file was not opened because its place is taken by something other than a
    plain file or folder.
    """
    return isinstance(error, OSError) and error.errno in (
        errno.ELOOP,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENXIO,
    )


def unreadable(path: Path, error: Exception) -> InputError:
    """Returns the error for a file that the system refuses to read."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return InputError(
        f"can't be read: {why}", where=shortened(printable(str(path)), 255), next=_LOOK
    )


def read_bytes(path: Path, most: int) -> bytes:
    """Reads a regular file of at most `most` bytes. Raises like `open_regular`, and InputError for
    a larger one.
    """
    try:
        with open_regular(path) as stream:
            # A file of /proc or /sys has size 0 and may be endless.
            content = stream.read(min(os.fstat(stream.fileno()).st_size, most + 1))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) > most:
        what = f"has more than {_size(most)}, the limit for such a file"
        raise InputError(what, where=str(path), next=f"ls -l {shlex.quote(str(path))}")
    return content


def read_text(path: Path, most: int) -> str:
    """Reads the text of a regular file, without a byte order mark. Raises like `read_bytes`, and
    InputError if it is not UTF-8.
    """
    return decode(read_bytes(path, most), str(path))


def decode(content: bytes, where: str) -> str:
    """Decodes bytes as UTF-8 text. Raises InputError with the line if they are not."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        what = f"is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}"
        raise InputError(
            what, where=f"{where}:{line}", next=f"file {where}; {converting(content, error.start)}"
        ) from error


def read_json(path: Path, most: int = RECORD) -> Any:
    """Reads a JSON file. Raises like `read_text` and `parse_json`."""
    return parse_json(read_text(path, most), str(path))


def parse_json(text: str, where: str, depth: int = DEEPEST) -> Any:
    """Parses strict JSON: finite numbers, no key twice, text that can be printed as UTF-8, at most
    `depth` levels deep.
    """
    first = f"{where}:1"
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_once
        )
    except json.JSONDecodeError as error:
        raise mistaken(text, where) or InputError(
            f"is not JSON: {error.msg}", where=f"{where}:{error.lineno}"
        ) from error
    except InputError as error:
        raise InputError(
            error.what, where=f"{where}:{line_of(text, error.key)}", key=error.key
        ) from error
    except RecursionError as error:
        raise InputError(f"is nested more than {depth} levels deep", where=first) from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise InputError("has a number of too many digits", where=first) from error
    if _is_deeper(value, depth):
        raise InputError(f"is nested more than {depth} levels deep", where=first)
    _require_text(text, value, first)
    return value


def parse_line(line: bytes, where: str) -> Any:
    """Parses one line of our .jsonl files, in which a number may be NaN. Raises InputError for
    anything else.
    """
    try:
        if len(line) > LINE:
            raise ValueError("the line is too long")
        text = line.decode()
        value = json.loads(text)
        if _is_deeper(value, DEEPEST):
            raise ValueError("it is nested too deeply")
        _require_text(text, value, where)
    except (ValueError, RecursionError) as error:
        raise InputError("is not a line of JSON", where=where, why=str(error)) from error
    return value


def lines_of(stream: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a stream with their ends; a line longer than LINE is cut and has no
    end.
    """
    while line := stream.readline(LINE + 1):
        cut = line
        while cut and not cut.endswith(b"\n"):
            cut = stream.readline(LINE + 1)
        yield line


def line_of(text: str, key: str) -> int:
    """Returns the first line of a JSON text with this (dotted) key's last name; 1 if it does not
    occur.
    """
    name = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
    match = re.search(re.escape(json.dumps(name)) + r"\s*:", text) if name else None
    return text.count("\n", 0, match.start()) + 1 if match else 1


def converting(content: bytes, at: int) -> str:
    """Suggests a fix for bytes that are not UTF-8 from `at` on: a wrong conversion would make text
    of anything.
    """
    begin = content[:4]
    if kind := kind_of(content):
        return f"exclude it: it is {kind}"
    if begin[:2] in (b"\xff\xfe", b"\xfe\xff") or content.count(0) > len(content) / 4:
        return f"convert it (iconv -f utf-{32 if bytes(2) in begin else 16} -t utf-8)"
    if known := next((suffix for magic, suffix in PACKED.items() if begin.startswith(magic)), None):
        return f"name it {known}, as it is compressed"
    if content[at] > 0xC1 and all(byte & 0xC0 == 0x80 for byte in content[at + 1 :]):
        return "download it again, as it ends in the middle of a character"
    if len(content.translate(None, PLAIN)) < len(content) / 100:
        return "convert it (iconv -f latin1 -t utf-8)"
    return "find its type with `file`"


def mistaken(
    text: str, where: str, forms: Iterable[tuple[str, str]] = MISTAKEN
) -> InputError | None:
    """Returns the error, with its line, for a text that is a known kind of other file; None for any
    other text.
    """
    for form, what in forms:
        if match := re.search(form, text[: 64 * KIBIBYTE], re.IGNORECASE | re.MULTILINE):
            return InputError(what, where=f"{where}:{text.count(chr(10), 0, match.end()) + 1}")
    return None


def unprintable(text: str) -> str | None:
    """Describes the first forbidden character of a one-line text: a control, a lone surrogate, a
    change of direction; or None.
    """
    if text.isascii() and text.isprintable():
        return None
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or _BIDIRECTIONAL.match(
            character
        ):
            return f"the character U+{ord(character):04X}"
    return None


def whole(text: str, most: int = LARGEST_COUNT) -> int | None:
    """Converts a text of ASCII digits to a number from 0 to `most`; None for any other text.

    Only this reads digits from elsewhere: int() accepts other alphabets' too, and raises at the
    4,301st.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))):
        return None
    return number if (number := int(text)) <= most else None


def show(value: Any) -> str:
    """Quotes a wrong value for a message: as JSON, shortened, in printable characters."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return shortened(printable(text[: 4 * SHOWN]))


def printable(text: str) -> str:
    r"""Escapes unprintable characters of a text as \\uXXXX."""
    return (
        text
        if unprintable(text) is None
        else "".join(c if unprintable(c) is None else f"\\u{ord(c):04x}" for c in text)
    )


def shortened(text: str, most: int = SHOWN) -> str:
    """Cuts a text to `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = (
            (stat.S_ISLNK, "a link"),
            (stat.S_ISDIR, "a folder"),
            (stat.S_ISFIFO, "a pipe"),
            (stat.S_ISSOCK, "a socket"),
        )
        kind = next((name for is_kind, name in kinds if is_kind(status.st_mode)), "a device")
        raise InputError(
            f"is {kind}, not a file", where=str(path), next=f"ls -ld {shlex.quote(str(path))}"
        )


def _refuse_constant(word: str) -> NoReturn:
    raise InputError(f"{word} is not a finite number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InputError(f"{shortened(text)} is not a finite number")
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        key = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InputError("is there twice", key=key)
    return found


def _is_deeper(value: Any, depth: int) -> bool:
    """Tells whether objects and lists are nested more than `depth` deep. A loop, as deep values
    would overflow recursion.
    """
    level = [value] if type(value) in (dict, list) else []
    for _ in range(depth):
        inside = (
            child for part in level for child in (part.values() if type(part) is dict else part)
        )
        level = [child for child in inside if type(child) in (dict, list)]
    return bool(level)


def _require_text(text: str, value: Any, where: str) -> None:
    """Raises InputError if a string has half of a surrogate pair, which JSON can spell but no
    program can print.
    """
    if _HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InputError("holds half of a surrogate pair", where=where) from error


def _size(count: int) -> str:
    return f"{count // MEBIBYTE} MiB" if count >= MEBIBYTE else f"{count // KIBIBYTE} KiB"
