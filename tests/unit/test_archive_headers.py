"""Archives whose headers are bombs: each is refused in one line, in memory that does not grow with what a header claims."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainfleet.config.types import Data
from trainfleet.data.documents import read_unit
from trainfleet.data.sources import plan_units
from trainfleet.trust.errors import DataError

MIB = 2**20
LARGE = 160 * MIB  # bytes of a header that claims 4 GB
CLAIMED = 4 * 10**9
ROOM = 50 * MIB
READ = """
import sys
from pathlib import Path
from trainfleet.config.types import Data
from trainfleet.data.documents import read_unit
from trainfleet.data.sources import plan_units
from trainfleet.trust.errors import DataError
def peak(): return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
import trainfleet.data.archives
before = peak()
try:
    for unit in plan_units(Data("set", (sys.argv[1],), "text", "bpe", 300, 0.1)).units:
        for document in read_unit(unit, "text"):
            pass
    print("taken")
except DataError as error:
    print(error.head + "; " + error.why)
print(peak() - before)
"""


def header(name: str, kind: bytes, size: int) -> bytes:
    """A tar's header that claims any size."""
    entry = tarfile.TarInfo(name)
    entry.type = kind
    block = bytearray(entry.tobuf(tarfile.USTAR_FORMAT)[:512])
    block[124:136] = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    return signed(block)


def signed(block: bytearray) -> bytes:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def packed(path: Path, parts: Iterator[bytes]) -> Path:
    with gzip.open(path, "wb", 1) as stream:
        for part in parts:
            stream.write(part)
    return path


def zeros(count: int) -> Iterator[bytes]:
    return (bytes(MIB) for _ in range(count // MIB))


def sparse() -> Iterator[bytes]:
    """A sparse file of the old GNU form, whose map goes on for ever."""
    block = bytearray(header("a.txt", tarfile.GNUTYPE_SPARSE, 0))
    block[386:482] = (b"%011o\0" % 0 + b"%011o\0" % 1) * 4
    block[482] = 1
    yield signed(block)
    more = (b"%011o\0" % 0 + b"%011o\0" % 1) * 21 + b"\1" + bytes(7)
    yield from (more * 2048 for _ in range(LARGE // 2 // MIB))


def accumulated() -> Iterator[bytes]:
    """Members behind a global PAX header each, of another key each, all of which tarfile keeps."""
    for number in range(LARGE // MIB):
        words = f"key{number}=".encode() + b"x" * (MIB // 2)
        record = b"%d %s\n" % (len(words) + 8, words)
        yield (
            header("g", b"g", len(record))
            + record
            + bytes(-len(record) % 512)
            + header("a.txt", b"0", 0)
        )


BOMBS: dict[str, Callable[[], Iterator[bytes]]] = {
    "PAX": lambda: iter([header("x", b"x", CLAIMED), *zeros(LARGE)]),
    "global PAX": lambda: iter([header("x", b"g", CLAIMED), *zeros(LARGE)]),
    "long name": lambda: iter([header("././@LongLink", b"L", CLAIMED), *zeros(LARGE)]),
    "long link": lambda: iter([header("././@LongLink", b"K", CLAIMED), *zeros(LARGE)]),
    "sparse map": sparse,
    "global headers that add up": accumulated,
}


def read_apart(path: Path) -> tuple[str, int]:
    """What a process that reads a source says, and by how many bytes it has grown."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", READ, str(path)]
    said, grown = subprocess.run(
        words, capture_output=True, text=True, check=True, env=environment
    ).stdout.splitlines()
    return said, int(grown)


@pytest.mark.parametrize("kind", BOMBS)
def test_a_header_of_any_size_is_refused_in_little_memory(kind: str, tmp_path: Path) -> None:
    bomb = packed(tmp_path / "a.tar.gz", BOMBS[kind]())
    words, grown = read_apart(bomb)
    assert words.startswith(f"{bomb}: is a damaged tar file") and "KiB" in words, words
    assert grown < ROOM, f"{grown / MIB:.0f} MiB"


def test_thousands_of_empty_members_take_no_memory_each(tmp_path: Path) -> None:
    empty = header("a", b"0", 0) * 2048
    bomb = packed(tmp_path / "a.tar.gz", (empty for _ in range(15)))
    words, grown = read_apart(bomb)
    assert words == "taken" and grown < 5 * MIB, f"{words}: {grown / MIB:.0f} MiB"


ODD: dict[str, bytes] = {
    "headers in headers": b"".join(
        header("x", kind, 0) for kind in (b"x", b"L") for _ in range(900)
    ),
    "a member of a negative size": header("a.txt", b"0", 0)[:124]
    + b"\xff" * 10
    + b"\xf8\0"
    + header("a.txt", b"0", 0)[136:],
    "a member larger than a number": header("a.txt", b"0", 2**80),
    "a member larger than the file": header("a.txt", b"0", 2**40),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_headers_that_lead_nowhere_are_refused(
    kind: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    content = ODD[kind]
    if "negative" in kind:
        content = signed(bytearray(content))
    path = tmp_path / "a.tar"
    path.write_bytes(pack(content + bytes(2 * 512)))
    with pytest.raises(DataError, match="damaged tar file"):
        texts(path)


def test_names_as_long_as_a_file_system_takes_are_read(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(
        fileobj=packed, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "é" * 1000}
    ) as archive:
        for number in range(40):
            entry = tarfile.TarInfo("/".join(["d" * 200] * 20) + f"/{number}.txt")
            entry.size, entry.pax_headers = 4, {"SCHILY.xattr.user.note": "x" * 60_000}
            archive.addfile(entry, io.BytesIO(b"text"))
    (tmp_path / "a.tar").write_bytes(packed.getvalue())
    assert texts(tmp_path / "a.tar") == ["text"] * 40


def texts(path: Path) -> list[str]:
    data = Data("set", (str(path),), "text", "bpe", 300, 0.1)
    return [
        document.text for unit in plan_units(data).units for document in read_unit(unit, "text")
    ]
