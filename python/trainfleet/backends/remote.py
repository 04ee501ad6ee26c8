"""A run whose folder is in S3, as its nodes share no disk: any machine with access to the bucket can look at it and stop it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from .. import s3
from ..errors import BackendError, S3Error
from ..link import Link
from ..runs import DATA, Run, is_locked
from ..uplink import NODES, SIGN, is_asked, is_node_s

SHARED = re.compile(r"stop|results\.json|heartbeats/attempts/.+")  # written by the launcher and by ranks, in turn
SILENT = 6 * SIGN  # seconds without a sign of any node after which none is at work


class Bucket:
    """A run below `root`, s3://bucket/prefix: its folder is <root>/runs/<name>, its dataset's logs are below <root>/data/.

    `others`: what else the run has in S3, which `folders` lists too: its checkpoints, its dataset.
    """

    words, pace = " in its bucket", 2.0

    def __init__(self, run: Run, root: str, dataset: str, others: Iterable[str] = ()) -> None:
        self.run, self.root, self.others = run, root.rstrip("/"), tuple(others)
        self.links = [Link(run.folder, f"{self.root}/runs/{run.name}"), Link(DATA / dataset, f"{self.root}/data/{dataset}")]
        self.address, self.leads = self.links[0].address, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def lead(self) -> None:
        """From now on this process is the launcher: what it writes, such as the config that nodes read, goes there too.

        What an earlier launch was asked is taken back.
        """
        self.leads = True
        with _as_backend():
            s3.remove(f"{self.address}/asked/stop")

    def refresh(self) -> None:
        """Brings what nodes and launcher have written, where no launcher on this machine does so already.

        Raises:
            BackendError: S3 does not answer.
        """
        if not self.leads and is_locked(self.run.folder):
            return
        with _as_backend():
            if self.leads:
                self.links[0].push(_is_launcher_s)
            for link in self.links:
                link.pull(self._is_wanted)

    def _is_wanted(self, name: str) -> bool:
        """Whether a file is to come here. A config that is here stays: it says what runs on this machine."""
        if name.endswith(".yaml") and (self.run.folder / name).exists():
            return False
        return bool(SHARED.fullmatch(name)) or not (self.leads and _is_launcher_s(name))

    def is_running(self) -> bool:
        """Whether a node has given a sign of life lately, by S3's clock."""
        with _as_backend():
            signs = [found.modified for found in s3.list_objects(f"{self.address}/{NODES}/")]
            return bool(signs) and s3.clock(self.address) - max(signs) < SILENT

    def ask_to_stop(self) -> None:
        with _as_backend():
            s3.write(f"{self.address}/asked/stop", str(time.time()).encode())

    def folders(self) -> dict[str, int]:
        """The run's folder, and what else it has in S3, with their bytes."""
        with _as_backend():
            sizes = {
                address: sum(found.size for found in s3.list_objects(f"{address}/"))
                for address in (self.address, self.links[1].address, *self.others)
            }
        return {address: size for address, size in sizes.items() if size}

    def remove(self, folders: Iterable[str]) -> None:
        known = (self.address, self.links[1].address, *self.others)
        for address in folders:
            assert address in known, address
            with _as_backend():
                s3.remove_all(found.address for found in s3.list_objects(f"{address}/"))


def _is_launcher_s(name: str) -> bool:
    """Whether a file is the launcher's to write."""
    owned = name.startswith(("events/launcher", "logs/launcher")) or not is_node_s(name)
    return owned or is_asked(name) or bool(SHARED.fullmatch(name))


@contextmanager
def _as_backend() -> Iterator[None]:
    """What S3 does not do is what the backend does not do: a look may go on with what was seen last."""
    try:
        yield
    except S3Error as error:
        raise BackendError(error.what, where=error.where, why=error.why, next=error.next) from error
