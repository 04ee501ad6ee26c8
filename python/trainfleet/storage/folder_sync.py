"""Two-way synchronization of a run folder on this machine with its copy in S3.

Layout in S3:
    <address>/results.json                    object of a file that is replaced
    <address>/logs/node-0.log/1-00000042      part of a file that grows, PART bytes each
    <address>/asked/stop  asked/heartbeats/…  requests to nodes, which one listing returns

Only the last part of a growing file is rewritten. Each file has one writer, so two machines never
write the same object. If a growing file is replaced, as metrics.jsonl is by a resume, its new parts
get the next generation, which is the number before the dash. The state of both directions is stored
in the folder (STATE). A killed process therefore continues where it stopped, and a poll costs one
listing and the new bytes.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..run import contents, run_folder
from ..trust import untrusted_input
from ..trust.errors import S3Error
from . import s3, sync_rules
from .files import upload

PART = 2**18  # part size in bytes; the last part of a growing file is rewritten until it is full
ROOM = 64  # maximum parts per file and `push`; later calls upload the rest
WHOLE = 2**24  # bytes above which an object is downloaded in pieces
STATE = contents.SYNCED.name
ASKED = re.compile(
    r"stop|config\.yaml|given\.yaml|heartbeats/(?:dump|attempts/[0-9]{1,9}(?:\.taken)?)"
)
SIGNS = re.compile(r"heartbeats/node-[0-9]{1,9}|handle\.json|request\.json")
SMALL = 16 * sync_rules.MIB  # maximum size in bytes of a file that matches ASKED or SIGNS
FOLDERS = (
    "",
    "events",
    "heartbeats",
    "heartbeats/attempts",
    "logs",
    "plots",
    "profile",
    "tensorboard",
)
_PART = re.compile(r"(.+)/([0-9]{1,9})-([0-9]{8})")


@dataclass
class Sent:
    """Upload state of a local file.

    If the file grows, all bytes before `start` and then part `number` have been uploaded.
    """

    inode: int
    size: int
    stamp: int
    generation: int = 1
    number: int = 0
    start: int = 0
    # CRC-32 of the last PART bytes before `size`, because a replaced file may reuse the inode
    ending: int = 0


@dataclass
class Brought:
    """Download state of a file in S3: the ETag of its object, or the size of each part."""

    version: str = ""
    generation: int = 0
    sizes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class There:
    """File in S3, as one object or as parts.

    Parts belong to the newest generation (1 or more), and are in order up to the first gap.
    """

    objects: list[s3.Object]
    generation: int = 0


def travels(name: str) -> int | None:
    """Returns the size limit for synchronizing a file, or None if the file is not synchronized."""
    return SMALL if ASKED.fullmatch(name) or SIGNS.fullmatch(name) else sync_rules.limit(name)


def grows(name: str) -> bool:
    """Returns whether a file is append-only."""
    return name.endswith(sync_rules.GROWING) or name.startswith("tensorboard/")


class FolderSync:
    """Synchronizer of a local folder with its address in S3."""

    def __init__(self, folder: Path, address: str) -> None:
        untrusted_input.seal(folder)
        self.folder, self.address = folder, address.rstrip("/")
        self.sent, self.brought = dict[str, Sent](), dict[str, Brought]()
        # files in S3 at the first listing of this process
        self.there: dict[str, There] | None = None
        self._recall()
        self.kept = self._state()

    def push(
        self, mine: Callable[[str], bool], obeyed: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Uploads new content of the files that `mine` accepts, small files first.

        After an S3Error, the next call uploads the rest. If a local request file is gone, its
        object is removed. That includes requests that `obeyed` accepts, although they are never
        uploaded.
        """
        self.there = self.look() if self.there is None else self.there
        names = [name for name in self._names() if mine(name)]
        for name in sorted(names, key=grows):
            with suppress(FileNotFoundError):  # The file was just removed.
                self._push(name)
        gone = [
            name
            for name in self.sent
            if ASKED.fullmatch(name) and not (self.folder / name).exists()
        ]
        for name in [name for name in gone if mine(name) or obeyed(name)]:
            s3.remove(self._object(name))  # The request was canceled.
            del self.sent[name]
        self._keep()

    def pull(self, theirs: Callable[[str], bool], below: str = "") -> None:
        """Downloads new content of the files that `theirs` accepts, below the prefix `below`.

        Raises RunError if the files can't be written here.
        """
        found = self.look(below)
        for name, there in found.items():
            if theirs(name):
                self._pull_parts(name, there) if there.generation else self._pull_object(
                    name, there.objects[0]
                )
        for name in [name for name in self.brought if ASKED.fullmatch(name) and name not in found]:
            del self.brought[name]  # A later request with this name is new.
            if name == "stop":  # The nodes have stopped, so the request is complete.
                sync_rules.remove(self.folder, name)
                self.sent.pop(name, None)
        self._keep()

    def look(self, below: str = "") -> dict[str, There]:
        """Returns the files in S3 by name."""
        found: dict[str, There] = {}
        for entry in s3.list_objects(f"{self.address}/{below}"):
            key = entry.address[len(self.address) + 1 :]
            name, match = file_of(key), _PART.fullmatch(key)
            if travels(name) is None:
                continue
            if match and grows(name):
                generation, number = int(match[2]), int(match[3])
                newest = found.get(name)
                if newest is None or newest.generation < generation:
                    newest = found[name] = There([], generation)
                # the listing is ordered by key, so parts after a gap do not match
                if (generation, number) == (newest.generation, len(newest.objects)):
                    newest.objects.append(entry)
            elif not grows(name) and self._object(name) == entry.address:
                found[name] = There([entry])
        if len(found) > sync_rules.FILES:
            raise S3Error(
                "has more files than a run folder may have",
                where=self.address,
                why=f"{len(found):,} files",
                next=f"aws s3 ls {self.address}/",
            )
        return {name: there for name, there in found.items() if there.objects}

    def waits(self, mine: Callable[[str], bool]) -> bool:
        """Returns whether a growing file has more content than the last `push` uploaded."""
        return any(
            not sent.stamp and mine(name) and (self.folder / name).exists()
            for name, sent in self.sent.items()
        )

    def _names(self) -> Iterator[str]:
        """Yields the names of local files to synchronize."""
        for inner in FOLDERS:
            folder = self.folder / inner
            for entry in (
                sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else ()
            ):
                name = f"{inner}/{entry.name}" if inner else entry.name
                if travels(name) is not None and entry.is_file(follow_symlinks=False):
                    yield name

    def _push(self, name: str) -> None:
        stat = (self.folder / name).stat()
        before = self.sent.get(name)
        if before and (before.inode, before.size, before.stamp) == (
            stat.st_ino,
            stat.st_size,
            stat.st_mtime_ns,
        ):
            return
        if grows(name):
            self._push_parts(name, stat)
        elif stat.st_size <= (travels(name) or 0):
            # This machine already has the content, so it must not download it again.
            self.brought[name] = Brought(upload(self._object(name), self.folder / name))
            self.sent[name] = Sent(stat.st_ino, stat.st_size, stat.st_mtime_ns)

    def _push_parts(self, name: str, stat: os.stat_result) -> None:
        before, there = self.sent.get(name), (self.there or {}).get(name)
        replaced = before is not None and not self._continues(name, before, stat)
        if before is None or replaced:
            after, number = 1, 0
            if before:
                after = before.generation + 1
            elif there:  # Append to the parts of an earlier writer.
                after, number = there.generation, len(there.objects)
            self.sent[name] = Sent(stat.st_ino, 0, 0, after, number)
            # Save the state first, so that after a kill the next process rewrites the same parts.
            self._keep()
        sent = self.sent[name]
        with open(self.folder / name, "rb", opener=untrusted_input.opener) as file:
            file.seek(sent.start)
            for _ in range(ROOM):
                self._push_part(name, sent, file.read(PART))
                if sent.size < sent.start + PART:
                    break
                sent.number, sent.start = sent.number + 1, sent.start + PART
        # 0 means that more content remains
        sent.stamp = stat.st_mtime_ns if sent.size == stat.st_size else 0
        if replaced:
            self._forget_before(name, sent.generation)

    def _continues(self, name: str, before: Sent, stat: os.stat_result) -> bool:
        """Returns whether a growing file still starts with the uploaded bytes."""
        same = before.inode == stat.st_ino and before.size <= stat.st_size
        return same and before.ending == self._ending(name, before.size)

    def _ending(self, name: str, size: int) -> int:
        with open(self.folder / name, "rb", opener=untrusted_input.opener) as file:
            file.seek(start := max(size - PART, 0))
            return zlib.crc32(file.read(size - start))

    def _push_part(self, name: str, sent: Sent, content: bytes) -> None:
        if (content or not sent.number) and sent.start < (travels(name) or 0):
            s3.write(f"{self.address}/{name}/{sent.generation}-{sent.number:08d}", content)
        sent.size = sent.start + len(content)
        sent.ending = self._ending(name, sent.size)

    def _forget_before(self, name: str, generation: int) -> None:
        """Removes the parts of earlier generations."""
        listed = s3.list_objects(f"{self.address}/{name}/")
        old = [
            found
            for found in listed
            if (match := _PART.fullmatch(found.address)) and int(match[2]) < generation
        ]
        s3.remove_all(found.address for found in old)

    def _pull_object(self, name: str, found: s3.Object) -> None:
        before = self.brought.get(name)
        if (before and before.version == found.version) or found.size > (travels(name) or 0):
            return
        for start in range(0, max(found.size, 1), WHOLE):
            data = s3.read_range(
                found.address,
                start,
                min(start + WHOLE, found.size),
                found.version,
                s3.ABSENT + s3.CHANGED,
            )
            if not data and found.size:
                return  # The object was replaced; the next poll downloads the new one.
            self._land(name, start, data)
        self._note(name, Brought(found.version), 0)

    def _pull_parts(self, name: str, there: There) -> None:
        have, most = self.brought.get(name), travels(name) or 0
        if (
            have is None
            or have.generation != there.generation
            or self._size(name) < sum(have.sizes)
        ):
            have = Brought(generation=there.generation)
        last = max(len(have.sizes) - 1, 0)
        for number, part in enumerate(there.objects[last:], last):
            known, whole = have.sizes[number] if number < len(have.sizes) else 0, sum(have.sizes)
            end = min(part.size, known + most - whole)
            if end <= known and have.sizes:
                continue
            data = s3.read_range(part.address, known, end, unless=s3.ABSENT)
            if len(data) != end - known:
                break  # The file is being replaced in S3; the next poll downloads it.
            self._land(name, whole, data)
            have.sizes[number:] = [end]
            self._note(name, have, len(there.objects))

    def _land(self, name: str, offset: int, data: bytes) -> None:
        """Writes as sync_rules.write does. Raises RunError if this disk would become too full."""
        sync_rules.require_room(self.folder, len(data))
        sync_rules.write(self.folder, name, offset, data)

    def _note(self, name: str, have: Brought, parts: int) -> None:
        """Records that a file was downloaded, so that it is not uploaded again."""
        self.brought[name] = have
        stat = (self.folder / name).stat()
        ending = self._ending(name, stat.st_size) if grows(name) else 0
        self.sent[name] = Sent(
            stat.st_ino,
            stat.st_size,
            stat.st_mtime_ns,
            max(have.generation, 1),
            parts,
            sum(have.sizes),
            ending,
        )

    def _size(self, name: str) -> int:
        try:
            return (self.folder / name).lstat().st_size
        except OSError:
            return 0

    def _object(self, name: str) -> str:
        return f"{self.address}/{'asked/' if ASKED.fullmatch(name) else ''}{name}"

    def _recall(self) -> None:
        record = run_folder.read_json(self.folder / STATE) or {}
        try:
            if record.get("address") == self.address:
                self.sent = {name: Sent(**fields) for name, fields in record["sent"].items()}
                self.brought = {
                    name: Brought(**fields) for name, fields in record["brought"].items()
                }
        # Another version of trainfleet wrote the state, so discard it.
        except (KeyError, TypeError, AttributeError):
            self.sent, self.brought = {}, {}

    def _keep(self) -> None:
        if (text := self._state()) != self.kept:
            sync_rules.write(self.folder, STATE, 0, text.encode())
            self.kept = text

    def _state(self) -> str:
        record: dict[str, Any] = {
            "address": self.address,
            "sent": self.sent,
            "brought": self.brought,
        }
        return json.dumps(record, default=asdict)


def file_of(key: str) -> str:
    """Returns the name of the file that an object stores, completely or in part."""
    match = _PART.fullmatch(key)
    return match[1] if match and grows(match[1]) else key.removeprefix("asked/")
