"""Reads all external input: files from users, nodes, other programs and earlier runs.

Only regular UTF-8 files up to a size limit are accepted, and JSON is limited in depth. Anything
else raises InputError with file and line. FileNotFoundError is not caught.
"""

from __future__ import annotations

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

KIBIBYTE, MEBIBYTE = 2**10, 2**20
RECORD = 16 * MEBIBYTE  # maximum size in bytes of results.json and similar files
LINE = MEBIBYTE  # maximum bytes per line of events or metrics
DEEPEST = 32  # maximum JSON nesting depth; trainfleet itself writes at most six levels
LARGEST_COUNT = 10**18  # upper bound for any count read from external input
SHOWN = 60  # maximum length of an invalid value quoted in a message
_SEALED = set[Path]()
_HOME: list[str] = []  # working folder to re-enter if its file handle becomes stale
IN_THE_WAY = "its path has a link, a device, or a file in place of a folder"
_LOOK = "run ls -l on its path"
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # escaped UTF-16 surrogate, possibly unpaired
MISTAKEN = (  # pattern of a wrong file type → message
    (r"\A\s*version https://git-lfs", "is a Git LFS pointer, not the file; run git lfs pull"),
    (r"\A\s*<(!DOCTYPE html|html|head|body)", "is a web page: the file was not downloaded"),
    (r"\A\s*<(\?xml|Error>)", "is XML"),
    (r"^(<<<<<<<|>>>>>>>) ", "has an unresolved merge conflict"),
)
# Unfilled template in a config. JSON files are not checked, because chat templates are valid there.
TEMPLATE = (r"\{\{[^{}\n\"']{0,80}\}\}|\{%", "is an unfilled template")
# Kubernetes, CloudFormation, Docker Compose and GitHub Actions. SkyPilot has `resources`.
OTHER = (r"^(?-i:apiVersion|Resources|services|jobs) *:", "is not a trainfleet config")
# Magic bytes of a compressed file → suffix.
PACKED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
# Bytes that are typical of Latin-1 text.
PLAIN = bytes({*range(32, 127), *range(160, 256), 9, 10, 13})
# Bidirectional control characters, which can disguise text by reordering it on screen.
_BIDIRECTIONAL = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def seal(folder: Path) -> None:
    """Marks a folder that other users may write to, such as a run folder.

    From then on, symbolic links below the folder are not followed. The folder itself may be a link.
    """
    _SEALED.update((folder, folder.absolute()))


def stay() -> None:
    """Makes this process re-enter its working folder if the folder's handle becomes stale.

    Ranks call this because they, unlike a launcher, can't be replaced by another process.
    """
    _HOME[:] = [str(Path.cwd())]


def is_sealed(path: Path) -> bool:
    """Returns whether a file is inside a sealed folder."""
    return not _SEALED.isdisjoint(path.parents)


def guarded(path: Path) -> int:
    """Returns the open(2) flag that rejects links (O_NOFOLLOW) for a file inside a sealed folder,
    or 0 for other files.

    Raises:
        OSError: a folder on the path is a link, or the path contains "..".
    """
    root = next((one for one in reversed(path.parents) if one in _SEALED), None)
    if root is None:
        return 0
    _reenter(root)
    inside = path.relative_to(root)
    if ".." in inside.parts or any((root / one).is_symlink() for one in inside.parents[:-1]):
        raise OSError(errno.ELOOP, "the path leads outside its folder")
    return os.O_NOFOLLOW


def _reenter(root: Path) -> None:
    """Re-enters the working folder by name if a remount has made it stale."""
    try:
        root.stat()
    except OSError as error:
        if error.errno == errno.ESTALE and _HOME:
            os.chdir(_HOME[0])


def opener(path: str, flags: int) -> int:
    """Opens a file for `open(path, mode, opener=untrusted_input.opener)`.

    Raises:
        OSError: the file is inside a sealed folder, and it or a folder on its path is a link (ELOOP
            or ENOTDIR).
    """
    linked = guarded(Path(path))
    if linked:
        linked |= os.O_NONBLOCK
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY | linked, 0o666)


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file. Rejects pipes, devices and sockets, which could block the reader.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the path is not a regular file, can't be opened, or contains a link inside a
            sealed folder.
    """
    try:
        _require_regular(path, path.stat(follow_symlinks=not guarded(path)))
        stream = os.fdopen(opener(str(path), os.O_RDONLY | os.O_NONBLOCK), "rb")
    except (FileNotFoundError, InputError):
        raise
    except (OSError, ValueError) as error:  # ValueError: the name contains a NUL character
        if is_in_the_way(error):
            raise InputError(f"can't be read: {IN_THE_WAY}", where=str(path), next=_LOOK) from error
        raise unreadable(path, error) from error
    return stream


def is_in_the_way(error: Exception) -> bool:
    """Returns whether the error means that the path contains an unexpected file type, such as a
    link.
    """
    return isinstance(error, OSError) and error.errno in (
        errno.ELOOP,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENXIO,
    )


def unreadable(path: Path, error: Exception) -> InputError:
    """Converts an OS error to the InputError for an unreadable file."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return InputError(
        f"can't be read: {why}", where=shortened(printable(str(path)), 255), next=_LOOK
    )


def read_bytes(path: Path, most: int) -> bytes:
    """Reads a regular file of at most `most` bytes.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the file is larger than `most`, or can't be read.
    """
    try:
        with open_regular(path) as stream:
            # Files in /proc and /sys report size 0 but may be endless.
            content = stream.read(min(os.fstat(stream.fileno()).st_size, most + 1))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) > most:
        what = f"is larger than {_size(most)}, the limit for this kind of file"
        raise InputError(what, where=str(path), next=f"ls -l {shlex.quote(str(path))}")
    return content


def read_text(path: Path, most: int) -> str:
    """Reads a UTF-8 text file of at most `most` bytes, and removes its byte order mark.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the file is too large, is not UTF-8, or can't be read.
    """
    return decode(read_bytes(path, most), str(path))


def decode(content: bytes, where: str) -> str:
    """Decodes UTF-8 text. Raises InputError with the line number of the first invalid byte."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(
            f"is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}",
            where=f"{where}:{line}",
            next=f"file {where}; {converting(content, error.start)}",
        ) from error


def read_json(path: Path, most: int = RECORD) -> Any:
    """Reads and parses a JSON file.

    Raises:
        FileNotFoundError: the file does not exist.
        InputError: the file can't be read, or is not strict JSON (see `parse_json`).
    """
    return parse_json(read_text(path, most), str(path))


def parse_json(text: str, where: str, depth: int = DEEPEST) -> Any:
    """Parses strict JSON.

    Raises:
        InputError: the text is not JSON, is nested more than `depth` levels deep, or contains a
            duplicate key, a non-finite number or an unpaired surrogate.
    """
    first = f"{where}:1"
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_once
        )
    except json.JSONDecodeError as error:
        raise mistaken(text, where) or InputError(
            f"is not JSON: {error.msg}" if text.strip() else "is empty",
            where=f"{where}:{error.lineno}",
        ) from error
    except InputError as error:
        raise InputError(
            error.what, where=f"{where}:{line_of(text, error.key)}", key=error.key
        ) from error
    except RecursionError as error:
        raise InputError(f"is nested more than {depth} levels deep", where=first) from error
    except ValueError as error:  # an integer with more digits than Python can convert
        raise InputError("has a number with too many digits", where=first) from error
    if _is_deeper(value, depth):
        raise InputError(f"is nested more than {depth} levels deep", where=first)
    _require_text(text, value, first)
    return value


def parse_line(line: bytes, where: str) -> Any:
    """Parses a line of a .jsonl file, in which numbers may be NaN. Raises InputError if it is
    invalid.
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
    """Yields a stream's lines, including line endings. Lines longer than LINE are truncated and
    have no line ending.
    """
    while line := stream.readline(LINE + 1):
        cut = line
        while cut and not cut.endswith(b"\n"):
            cut = stream.readline(LINE + 1)
        yield line


def line_of(text: str, key: str) -> int:
    """Returns the line where the last part of a dotted key first occurs in JSON text, or 1."""
    name = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
    match = re.search(re.escape(json.dumps(name)) + r"\s*:", text) if name else None
    return text.count("\n", 0, match.start()) + 1 if match else 1


def converting(content: bytes, at: int) -> str:
    """Suggests a fix for content with invalid UTF-8 at byte `at`. Suggests an encoding only if the
    bytes indicate one, because converting from the wrong encoding may succeed, too.
    """
    begin = content[:4]
    if kind := kind_of(content):
        return f"exclude it: it is {kind}"
    if begin[:2] in (b"\xff\xfe", b"\xfe\xff") or content.count(0) > len(content) / 4:
        return f"convert it (iconv -f utf-{32 if bytes(2) in begin else 16} -t utf-8)"
    if known := next((suffix for magic, suffix in PACKED.items() if begin.startswith(magic)), None):
        return f"name it {known}; it is compressed"
    if content[at] > 0xC1 and all(byte & 0xC0 == 0x80 for byte in content[at + 1 :]):
        return "download it again; it ends in the middle of a character"
    if len(content.translate(None, PLAIN)) < len(content) / 100:
        return "convert it (iconv -f latin1 -t utf-8)"
    return "find its type with `file`"


def mistaken(
    text: str, where: str, forms: Iterable[tuple[str, str]] = MISTAKEN
) -> InputError | None:
    """Returns an error if the text is another kind of file, such as a Git LFS pointer, or None
    otherwise.
    """
    for form, what in forms:
        if match := re.search(form, text[: 64 * KIBIBYTE], re.IGNORECASE | re.MULTILINE):
            return InputError(what, where=f"{where}:{text.count(chr(10), 0, match.end()) + 1}")
    return None


def unprintable(text: str) -> str | None:
    """Returns the first character that is not allowed in one-line text, or None.

    Control characters, lone surrogates and bidirectional controls are not allowed.
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
    """Parses ASCII digits as an integer from 0 to `most`. Returns None for any other text.

    Use this for all external input, because int() also accepts digits of other scripts and raises
    for more than 4,300 digits.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))):
        return None
    return number if (number := int(text)) <= most else None


def show(value: Any) -> str:
    """Formats an invalid value as short, printable JSON for a message."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return shortened(printable(text[: 4 * SHOWN]))


def printable(text: str) -> str:
    r"""Escapes unprintable characters as \\uXXXX."""
    if unprintable(text) is None:
        return text
    return "".join(c if unprintable(c) is None else f"\\u{ord(c):04x}" for c in text)


def shortened(text: str, most: int = SHOWN) -> str:
    """Truncates a text to `most` characters, with an ellipsis at the end."""
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
        raise InputError("is a duplicate key", key=key)
    return found


def _is_deeper(value: Any, depth: int) -> bool:
    """Returns whether objects and lists are nested more than `depth` levels deep.

    Iterates instead of recursing, because deep input would overflow the stack.
    """
    level = [value] if type(value) in (dict, list) else []
    for _ in range(depth):
        inside = (
            child for part in level for child in (part.values() if type(part) is dict else part)
        )
        level = [child for child in inside if type(child) in (dict, list)]
    return bool(level)


def _require_text(text: str, value: Any, where: str) -> None:
    """Raises InputError if a string contains an unpaired surrogate, which JSON can express but
    UTF-8 can't.
    """
    if _HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise InputError("has an unpaired surrogate", where=where) from error


def _size(count: int) -> str:
    return f"{count // MEBIBYTE} MiB" if count >= MEBIBYTE else f"{count // KIBIBYTE} KiB"


SIGNATURES = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"II*\x00": "a TIFF image",
    b"MM\x00*": "a TIFF image",
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a zip archive, such as .docx or .xlsx",
    b"\xd0\xcf\x11\xe0": "an old Word or Excel file",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x7fELF": "an executable",
    b"MZ": "an executable",
    b"\x00asm": "an executable",
    b"\xca\xfe\xba\xbe": "a Java class",
    b"SQLite format 3": "a SQLite database",
    b"PAR1": "a Parquet file; name it .parquet",
    b"ARROW1": "an Arrow file; name it .arrow",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"RIFF": "an audio, image or video file",
    b"ID3": "an audio file",
    b"OggS": "an audio or video file",
    b"wOF": "a font file",
}


def kind_of(content: bytes) -> str:
    """Returns a description of a binary file's type, or "" if the type is unknown."""
    if content[4:8] == b"ftyp":
        return "a video file"
    return next((kind for magic, kind in SIGNATURES.items() if content.startswith(magic)), "")
