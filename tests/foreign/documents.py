"""Source files whose texts are no texts: every kind of file, cut, flipped and made to deceive. Nothing but a refusal may come of one."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import zstandard

from trainfleet.config.types import Data
from trainfleet.data.documents import read_unit
from trainfleet.data.sources import plan_units

from .cases import Case

DATA = Data("set", (), "text", "bpe", 300, 0.1)
TEXTS = [f'{number} ab é日😀\n\t",;\\' for number in range(40)]
LINES = "".join(
    json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(TEXTS)
).encode()
HUGE = b"9" * 5000  # a number that Python does not read
RECORDS = {  # what a line or an entry of JSON may be
    "half a pair": b'{"text": "a\\ud800b"}', "a number of 5,000 digits": b'{"text": "a", "id": %s}' % HUGE, "no object": b"[1, 2]", "a string": b'"text"', "a number": b"4", "a huge number": HUGE, "null": b"null", "no text": b'{"id": 4}',
    "null text": b'{"text": null}', "a list": b'{"text": ["a"]}', "NaN": b'{"text": NaN}', "deep": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "cut": b'{"text": "a', "two": b'{"text": "a"} {"text": "b"}', "single quotes": b"{'text': 'a'}",
    "not UTF-8": b'{"text": "\xff\xfe"}', "UTF-16": '{"text": "a"}'.encode("utf-16"), "NUL": b"\0" * 40, "control": b'{"text": "a\x01"}', "escape": b'{"\\u001b[31m": 1}', "long": b'{"text": "' + b"x" * (64 * 2**20 + 9) + b'"}', "comma": b'{"text": "a"},',
}  # fmt: skip


def read(name: str, content: bytes) -> Callable[[Path], object]:
    """A run that reads all documents of a file with this content."""

    def run(folder: Path) -> int:
        (folder / name).write_bytes(content)
        data = replace(DATA, sources=(str(folder / name),))
        return sum(
            document.size for unit in plan_units(data).units for document in read_unit(unit, "text")
        )

    return run


def records() -> Iterator[Case]:
    """Each bad record in each kind of file that holds JSON, behind a good one."""
    good = b'{"text": "a"}'
    for label, record in RECORDS.items():
        lines = good + b"\n" + record + b"\n"
        yield Case("record", f"line: {label}", read("a.jsonl", lines), refused=label != "null text")
        yield Case(
            "record",
            f"line, gzip: {label}",
            read("a.jsonl.gz", gzip.compress(lines, 1)),
            refused=label != "null text",
        )
        yield Case(
            "record",
            f"line, zstd: {label}",
            read("a.jsonl.zst", zstandard.compress(lines)),
            refused=label != "null text",
        )
        yield Case(
            "record",
            f"line of a .json: {label}",
            read("a.json", lines),
            refused=label != "null text",
        )
        yield Case(
            "record",
            f"entry: {label}",
            read("a.json", b"[" + good + b", " + record + b"]"),
            refused=label != "null text",
        )
        yield Case(
            "record",
            f"member: {label}",
            read("a.tar", tar({"a.txt": b"a", "b.json": record})),
            refused=label not in ("null text", "UTF-16"),
        )


def tables() -> Iterator[Case]:
    """Tables that are none."""
    for label, content in {
        "empty head": b"\n\na\n", "no column": b"id,words\n1,a\n", "few cells": b"id,text\n1\n", "many cells": b"id,text\n1,a, b\n", "open quote": b'id,text\n1,"a\n', "quote within": b'id,text\n1,"a"b\n', "not UTF-8": b"id,text\n1,\xff\n", "UTF-16": "id,text\n1,a\n".encode("utf-16"),
        "NUL": b"id,text\n1,a\0b\n2\n", "long cell": b"id,text\n1," + b"x" * (64 * 2**20 + 9), "long head": b"x" * (64 * 2**20 + 9), "long row": b"id,text\n" + b"x," * (32 * 2**20 + 9), "open quote, long": b'id,text\n1,"' + (b"x" * 2**20 + b"\n") * 66,
    }.items():  # fmt: skip
        yield Case("table", label, read("a.csv", content))
    for label, kind in COLUMNS.items():
        if "moment" not in label:  # which Parquet can't have
            yield Case("column", f"Parquet: {label}", read("a.parquet", parquet(kind())))
        yield Case("column", f"Arrow: {label}", read("a.arrow", arrow(kind())))


def _twice() -> pyarrow.Table:
    return pyarrow.Table.from_arrays(
        [pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"]
    )


def _column(kind: pyarrow.DataType, value: object) -> Callable[[], pyarrow.Table]:
    return lambda: pyarrow.table({"id": [1], "text": pyarrow.array([value], kind)})


def _no_utf8() -> pyarrow.Table:
    return pyarrow.table(
        {"id": [1], "text": pyarrow.array([b"a\xff\xfe"], pyarrow.binary()).view(pyarrow.utf8())}
    )


COLUMNS: dict[str, Callable[[], pyarrow.Table]] = {
    "twice": _twice, "not UTF-8": _no_utf8, "bytes": _column(pyarrow.binary(), b"a"), "numbers": _column(pyarrow.int64(), 4), "lists": _column(pyarrow.list_(pyarrow.string()), ["a"]),
    "moment": _column(pyarrow.timestamp("ns"), 2**62), "far moment": _column(pyarrow.timestamp("s"), 2**60), "structs": _column(pyarrow.struct([("a", pyarrow.string())]), {"a": "b"}), "no column": lambda: pyarrow.table({"id": [1]}), "no columns": lambda: pyarrow.table({}),
}  # fmt: skip


def parquet(table: pyarrow.Table) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, row_group_size=10)
    return file.getvalue()


def arrow(table: pyarrow.Table) -> bytes:
    file = io.BytesIO()
    with pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    return file.getvalue()


def stream(table: pyarrow.Table) -> bytes:
    file = io.BytesIO()
    with pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    return file.getvalue()


def tar(members: dict[str, bytes], form: int = tarfile.PAX_FORMAT, **changed: object) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in changed.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def bombs() -> Iterator[Case]:
    """Little files that become large ones, and large ones without an end of line."""
    zeros = b"\0" * 2**20
    packed = {".gz": gzip.compress(zeros) * 300, ".zst": zstandard.compress(zeros * 300)}
    for suffix, content in packed.items():
        yield Case("bomb", f"text{suffix}", read(f"a.txt{suffix}", content))
        yield Case("bomb", f"lines{suffix}", read(f"a.jsonl{suffix}", content))
    member = tarfile.TarInfo("a.txt")
    member.size = 300 * len(zeros)
    head = gzip.compress(member.tobuf())
    yield Case("bomb", "tar.gz", read("a.tar.gz", head + packed[".gz"]))
    for suffix in (".jsonl", ".csv", ".json", ".tsv"):
        yield Case("bomb", f"one line{suffix}", sparse(f"a{suffix}", 2**30))
    yield Case("bomb", "one line.txt", sparse("a.txt", 2**30), refused=False)


def sparse(name: str, size: int) -> Callable[[Path], object]:
    """A run that reads a file of so many zeros, which takes no room on the disk."""

    def run(folder: Path) -> object:
        with (folder / name).open("wb") as file:
            file.truncate(size)
        data = replace(DATA, sources=(str(folder / name),))
        pieces = (next(read_unit(unit, "text"), None) for unit in plan_units(data).units)
        return next(pieces)

    return run


def tars() -> Iterator[Case]:
    """Tars that lie, and those that other programs compress."""
    good = tar({"a.txt": b"text", "b.json": b'{"text": "b"}'})
    for label, pack in {"bz2": bz2.compress, "xz": lzma.compress, "gzip": gzip.compress}.items():
        yield Case("tar", f"{label}, cut", read("a.tar", pack(good)[:-9]), refused=False)
        yield Case(
            "tar", f"{label}, broken", read("a.tar", pack(good)[:20] + b"x" * 400), refused=False
        )
    for label, size in {"negative": -512, "very negative": -(2**62), "huge": 2**62}.items():
        member = tarfile.TarInfo("a.txt")
        member.size = 0
        head = bytearray(member.tobuf(tarfile.GNU_FORMAT))
        head[124:136] = bytes([0xFF if size < 0 else 0x80]) + (size % 2**88).to_bytes(11, "big")
        head[148:156] = b"%06o\0 " % (sum(head[:148]) + 8 * 32 + sum(head[156:]))
        yield Case(
            "tar", f"{label} size", read("a.tar", bytes(head) + b"text" * 512), refused=False
        )
    for label, name in {
        "half a pair": "a\udcff.json",
        "escape": "\x1b[31m.json",
        "newline": "a\nb.json",
        "long": "x" * 9000 + ".json",
        "outside": "../../a.json",
    }.items():
        yield Case("tar", f"name: {label}", read("a.tar", tar({name: b"{"})))
    for label, value in {
        "size": {"size": "x"},
        "huge size": {"size": "9" * 5000},
        "negative size": {"size": "-4"},
        "sparse": {
            "GNU.sparse.size": "-1",
            "GNU.sparse.map": "x",
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
        },
        "odd": {"hdrcharset": "x", "path": "\0"},
    }.items():
        yield Case(
            "tar",
            f"PAX {label}",
            read("a.tar", tar({"a.txt": b"text"}, pax_headers=value)),
            refused=False,
        )


@cache
def whole() -> dict[str, bytes]:
    """A good file of each kind."""
    table = pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS})
    packed = "".join(TEXTS).encode()
    archive = tar(
        {f"{number}.txt": text.encode() for number, text in enumerate(TEXTS)}
        | {"a.json": b'{"text": "a"}'}
    )
    return {
        "a.jsonl": LINES, "a.json": b"[" + LINES.replace(b"\n", b",")[:-1] + b"]", "a.jsonl.gz": gzip.compress(LINES), "a.jsonl.zst": zstandard.compress(LINES), "a.txt": packed, "a.txt.gz": gzip.compress(packed),
        "a.txt.zst": zstandard.compress(packed), "a.parquet": parquet(table), "a.arrow": arrow(table), "b.arrow": stream(table), "a.csv": b"id,text\n" + b"".join(b'%d,"t%d"\n' % (i, i) for i in range(40)), "a.tar": archive, "a.tar.gz": gzip.compress(archive),
    }  # fmt: skip


def drawn(seed: int, count: int) -> Iterator[Case]:
    """Good files of each kind with some bytes changed, cut out, doubled or replaced."""
    draw = random.Random(seed)
    for number in range(count):
        name, content = draw.choice(list(whole().items()))
        text = bytearray(content)
        for _ in range(draw.randint(1, 5)):
            at, size = draw.randrange(len(text) + 1), draw.randint(1, 60)
            match draw.randrange(5):
                case 0:
                    del text[at:]
                    text = text or bytearray(b"x")
                case 1:
                    del text[at : at + size]
                    text = text or bytearray(b"x")
                case 2:
                    text[at : at + 1] = bytes([draw.randrange(256)])
                case 3:
                    text[at : at + 8] = draw.choice(
                        (
                            b"\0" * 8,
                            b"\xff" * 8,
                            (2**31).to_bytes(8, "little"),
                            (2**62).to_bytes(8, "big"),
                        )
                    )
                case _:
                    text[at:at] = text[at : at + size]
        yield Case(
            "damaged", f"{name}, seed {seed}, {number}", read(name, bytes(text)), refused=False
        )
