"""One piece of a checkpoint: what torch.save wrote, read without torch.load.

torch.save writes a zip of stored, never compressed, parts: `data.pkl`, a pickle that says how the numbers lie, and the numbers as
they are. Read here as data (`pickled`) and straight into the reader's memory, a piece can run nothing, and takes no more of it
than it has bytes. https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import math
import struct
import zipfile
from dataclasses import dataclass
from typing import Any, BinaryIO

from ...storage.s3_streams import Seekable
from ..pieces import NUMBERS, ArchivePiece, PiecePlace
from . import pickled
from .pickled import Made

STORAGES = {  # class of torch's → number format
    "torch.DoubleStorage": "F64", "torch.FloatStorage": "F32", "torch.HalfStorage": "F16", "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64", "torch.IntStorage": "I32", "torch.ShortStorage": "I16", "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8", "torch.BoolStorage": "BOOL",
}  # fmt: skip
FORMATS = {  # number format as torch calls it → as safetensors does
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.int64": "I64",
    "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8", "torch.bool": "BOOL",
}  # fmt: skip
HEADER = 30  # bytes of a zip's local header, before the name: APPNOTE.TXT 4.3.7
LARGEST_PICKLE = 2**26  # bytes: what says how numbers lie takes a hundred, a rank's random numbers twenty thousand


@dataclass(frozen=True)
class Stored(ArchivePiece):
    """A piece that torch.save wrote: `length` bytes of a file, from `first` on."""

    first: int = 0
    length: int = 0


def place_of(stream: BinaryIO, piece: Stored) -> PiecePlace:
    """Where the numbers of the tensor lie that a piece holds.

    Raises:
        ValueError: it is another's, of another size or number format, or not all there.
    """
    archive = Archive(stream, piece)
    try:
        numbers = numbers_of(archive.content())
    except ValueError:
        numbers = None
    if numbers is None or numbers.dtype != piece.dtype or numbers.size != tuple(piece.size):
        raise ValueError(f"{piece.name} does not hold {piece.dtype} numbers of size {tuple(piece.size)}")
    return archive.place(numbers)


@dataclass(frozen=True)
class TensorNumbers:
    """Where a tensor's numbers lie in an archive: in a part of `count` numbers, from number `first` on."""

    key: str
    dtype: str
    count: int
    first: int
    size: tuple[int, ...]
    strides: tuple[int, ...]


def numbers_of(made: object) -> TensorNumbers:
    """The tensor that a pickle describes. ValueError if it is none, or has more numbers than its part."""
    wrong = ValueError("it is no tensor, or has more numbers than are there")
    if not isinstance(made, Made) or made.of != "torch._utils._rebuild_tensor_v2":
        raise wrong
    match made.arguments:
        case (
            Made(of="persistent", arguments=(("storage", storage, str(key), _, int(count)),)),
            int(first),
            tuple(size),
            tuple(strides),
            *_,
        ):
            pass
        case _:
            raise wrong
    if type(storage) is not pickled.Name or storage not in STORAGES or len(size) != len(strides):
        raise wrong
    if not all(type(number) is int and 0 <= number < 2**60 for number in (count, first, *size, *strides)):
        raise wrong
    last = first + sum((extent - 1) * stride for extent, stride in zip(size, strides, strict=True))
    if math.prod(size) > count or (math.prod(size) and last >= count):
        raise wrong
    return TensorNumbers(key, STORAGES[storage], count, first, size, strides)


class Archive:
    """The parts of one piece."""

    def __init__(self, stream: BinaryIO, piece: Stored) -> None:
        self.window, self.name = Window(stream, piece.first, piece.length), piece.name
        try:
            with zipfile.ZipFile(self.window) as archive:  # reads its table of contents, and that is all it is asked for
                self.parts = {part.filename.partition("/")[2]: part for part in archive.infolist()}
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, OverflowError) as error:
            raise ValueError(f"{piece.name} is not what torch.save writes: {error}") from error

    def content(self) -> Any:
        """What `data.pkl` says. ValueError when it can't be read."""
        if self._order() != "little":
            raise ValueError(f"{self.name} is not what torch.save writes here")
        return pickled.read(self.part("data.pkl"))

    def place(self, numbers: TensorNumbers) -> PiecePlace:
        """Where a tensor lies in the file. ValueError when not all of its numbers are in the archive."""
        size, strides, key = numbers.size, numbers.strides, f"data/{numbers.key}"
        if not math.prod(size):
            return PiecePlace(0, 0, numbers.dtype, size, strides)
        first = self.window.first + self._find(key, numbers.count * NUMBERS[numbers.dtype])
        return PiecePlace(first, numbers.count, numbers.dtype, size, strides, numbers.first)

    def part(self, name: str) -> bytes:
        """A small part. ValueError when it is missing or large."""
        part = self.parts.get(name)
        if part is None or part.file_size > LARGEST_PICKLE:
            raise ValueError(f"{self.name} is not what torch.save writes here")
        content = bytearray(min(part.file_size, self.window.length))
        self._read_into(name, memoryview(content))
        return bytes(content)

    def _read_into(self, name: str, memory: memoryview) -> None:
        self.window.seek(self._find(name, len(memory)))
        if len(memory) and self.window.readinto(memory) != len(memory):
            raise ValueError(f"{self.name} ends before its {name}")

    def _find(self, name: str, size: int) -> int:
        """Where a part begins that has `size` bytes. ValueError when it is missing, packed, of another size, or cut off."""
        part = self.parts.get(name)
        if part is None or part.compress_type != zipfile.ZIP_STORED or not part.file_size == part.compress_size == size:
            raise ValueError(f"{self.name} does not have {size:,} bytes as its {name}")
        self.window.seek(part.header_offset)
        header = self.window.read(HEADER)
        start: int = part.header_offset + HEADER + sum(struct.unpack_from("<HH", header.ljust(HEADER), 26))
        if start + size > self.window.length:
            raise ValueError(f"{self.name} ends before its {name}")
        return start

    def _order(self) -> str:
        """The byte order; files of before it was noted are of machines like this."""
        return self.part("byteorder").decode() if "byteorder" in self.parts else "little"


class Window(Seekable):
    """A part of a stream as a stream of its own, which ends where the part does."""

    def __init__(self, stream: BinaryIO, first: int, length: int) -> None:
        super().__init__(length)
        self.stream, self.first = stream, first

    def read(self, size: int = -1) -> bytes:
        """At most what is left, whatever is asked for: a damaged file may ask for a terabyte."""
        left = max(self.length - self.at, 0)
        return super().read(left if size < 0 else min(size, left)) or b""

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self.length - self.at, 0)]
        self.stream.seek(self.first + self.at)
        done = self.stream.readinto(view)  # type: ignore[attr-defined]
        self.at += done
        return int(done)
