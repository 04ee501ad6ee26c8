"""Access to run folders: on this machine, on a file system that the nodes share, or in S3.

All run data that moves between machines passes through a Place. Any machine with access to the
bucket can read and stop a run in S3.
"""

from __future__ import annotations

import os
import platform
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self

from ..config import Config, Refusals
from ..health.lease import (
    FILE,
    Holder,
    Launching,
    is_held,
    is_renewed,
    launching_text,
    led_already,
    parse_launching,
    read_holder,
    read_launching,
    require_vacant,
    show_launching,
)
from ..process.processes import identity
from ..run import contents
from ..run.claims import ROOM
from ..run.run_folder import DATA, Run, is_locked
from ..storage import s3
from ..storage.folder_sync import FolderSync, file_of
from ..storage.s3_sync_agent import NODES, SIGN, is_asked, is_node_s
from ..trust.untrusted_input import show


class Place(Protocol):
    """Location of a run folder. As a context manager, it closes its connections on exit.

    The local run folder reflects the last `refresh`.

    words       text after "is not running", such as " on this machine" or " on the fleet"
    pace        minimum useful interval between refreshes, in seconds
    lag         maximum delay of the ranks' state in the local copy, in seconds
    lead        makes this process the run's launcher, so that each refresh uploads its files;
                raises BackendError if another launcher leads
    refresh     updates the local run folder; raises BackendError if no machine with the run folder
                responds
    supplement  downloads the scheduler's logs of nodes that have no log, into the folder of the run
                or its dataset; raises BackendError if the scheduler does not respond
    is_running  returns whether a launcher led the run at the last refresh
    launching   returns the launch record at this location, or None
    show        writes the launch record, or clears it if no launch is active; with `obeyed`, also
                clears the stop request
    ask_to_stop writes the stop request, which ranks check at every step
    folders     returns the run's folders on other machines: folder → bytes
    remove      deletes these folders, but in a dataset only the program's files; returns the files
                that remain
    forward     runs a verb where the run's files are, and prints its output here; returns its exit
                code, or None if the files are on this machine. `config` is the run's config
    """

    words: str
    pace: float
    lag: float

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def lead(self) -> None:
        return

    def refresh(self) -> None:
        return

    def supplement(self, folder: Path) -> None:
        return

    @abstractmethod
    def is_running(self) -> bool: ...
    @abstractmethod
    def launching(self) -> Launching | None: ...
    @abstractmethod
    def show(self, launching: Launching | None, obeyed: bool = False) -> None: ...
    @abstractmethod
    def ask_to_stop(self) -> None: ...
    def folders(self) -> dict[str, int]:
        return {}

    def remove(self, folders: Iterable[str]) -> list[str]:
        return []

    def forward(self, verb: str, config: Config, variables: dict[str, str]) -> int | None:
        return None


class Here(Place):
    """A run that exists only on this machine."""

    words, pace, lag = " on this machine", 0.3, 0.0

    def __init__(self, run: Run) -> None:
        self.run = run

    def is_running(self) -> bool:
        return is_locked(self.run.folder)

    def launching(self) -> Launching | None:
        return read_launching(self.run)

    def show(self, launching: Launching | None, obeyed: bool = False) -> None:
        show_launching(self.run, launching, obeyed)

    def ask_to_stop(self) -> None:
        self.run.ask_to_stop()


class OnHead(Here):
    """A run on a fleet's head, in the folder that all hosts share.

    Any host can lead it, but only one at a time (health/lease.py).
    """

    def lead(self) -> None:
        require_vacant(self.run.folder)

    def is_running(self) -> bool:
        return is_renewed(self.run.folder)


class Shared(Here):
    """A run in a Slurm cluster's shared folder.

    `has_job` returns whether the scheduler has an active job for the run.
    """

    # Lustre and NFS can take several seconds to show writes from other machines
    words = " on the cluster"
    pace = 1.0
    lag = 5.0

    def __init__(self, run: Run, has_job: Callable[[], bool]) -> None:
        super().__init__(run)
        self.has_job = has_job

    def lead(self) -> None:
        """Raises BackendError if another launcher on any machine leads the run."""
        holder = read_holder(self.run.folder)
        if holder and _is_alive(self.run, holder):
            raise led_already(self.run.name, f"{self.run.folder}, launched on {holder.host}")

    def is_running(self) -> bool:
        holder = read_holder(self.run.folder)
        return (holder is not None and _is_alive(self.run, holder)) or self.has_job()


def _is_alive(run: Run, holder: Holder) -> bool:
    """Returns whether a live launcher holds the lease.

    A launcher on this machine counts as dead if its process does not exist. If the lease is not
    fresh, waits for a renewal.
    """
    if holder.host == platform.node() and holder.pid != os.getpid() and not identity(holder.pid):
        return False
    return is_held(holder, time.time()) or is_renewed(run.folder)


# files that both the launcher and the ranks write, at different times
SHARED = re.compile(r"stop|results\.json|heartbeats/attempts/.+")
VACANT = 15.0  # seconds without a lease renewal in S3 after which another launcher may lead
# seconds without a heartbeat from any node after which the run counts as ended
SILENT = 6 * SIGN


class BucketPlace(Place):
    """A run in S3, in <root>/runs/<name>, where `root` is s3://bucket/prefix.

    The dataset's logs are in <root>/data/, and the dataset itself is in <store>/<dataset>. `others`
    lists the run's other S3 addresses, such as its checkpoints. `has_job` returns whether the
    service has a queued or running job for the run. `consoles` downloads the service's logs for
    nodes that have no log. Its arguments are a local folder and the folder's address in S3.
    """

    words, pace, lag = " in its bucket", 2.0, 30.0

    def __init__(
        self,
        run: Run,
        root: str,
        dataset: str,
        store: str = "",
        others: Iterable[str] = (),
        has_job: Callable[[], bool] = lambda: False,
        consoles: Callable[[Path, str], None] = lambda folder, address: None,
    ) -> None:
        self.run, self.root, self.has_job, self.consoles = run, root.rstrip("/"), has_job, consoles
        self.links = [
            FolderSync(run.folder, f"{self.root}/runs/{run.name}"),
            FolderSync(DATA / dataset, f"{self.root}/data/{dataset}"),
        ]
        self.address, self.leads = self.links[0].address, False
        self.datasets = (
            self.links[1].address,
            *([f"{store.rstrip('/')}/{dataset}"] if store else []),
        )
        self.known = (self.address, *self.datasets, *others)

    def lead(self) -> None:
        """Makes this process the launcher, so that `refresh` also uploads the launcher's files.

        Nodes read some of them, such as the config.

        Raises:
            BackendError: another launcher leads, or S3 does not respond.
        """
        holder = read_holder(self.run.folder)
        if holder and self._is_led():
            raise led_already(self.run.name, f"{self.address}, launched on {holder.host}")
        self.leads = True

    def refresh(self) -> None:
        """Downloads files written by the nodes and the launcher.

        Does nothing if a launcher on this machine already downloads them.

        Raises:
            BackendError: S3 does not respond.
        """
        if not self.leads and is_locked(self.run.folder):
            return
        if self.leads:
            self.links[0].push(_is_launcher_s)
        for link in self.links:
            link.pull(self._is_wanted)

    def supplement(self, folder: Path) -> None:
        self.consoles(folder, f"{self.root}/{folder}")

    def _is_wanted(self, name: str) -> bool:
        """Returns whether to download a file.

        Keeps an existing local config, because it describes the run on this machine.
        """
        if name.endswith(".yaml") and (self.run.folder / name).exists():
            return False
        return bool(SHARED.fullmatch(name)) or not (self.leads and _is_launcher_s(name))

    def is_running(self) -> bool:
        """Returns whether a launcher or node is alive by S3's clock, or the service has an active
        job.
        """
        return self._is_led() or self._is_new(f"{NODES}/", SILENT) or self.has_job()

    def _is_led(self) -> bool:
        """Returns whether a launcher leads the run, judging by the lease at the last refresh."""
        holder = read_holder(self.run.folder)
        # a launch record means that no launcher leads yet, because a lease renewal clears it
        led = holder is not None and holder.code is None and not read_launching(self.run)
        return led and self._is_new(FILE, VACANT)

    def _is_new(self, name: str, seconds: float) -> bool:
        times = [found.modified for found in s3.list_objects(f"{self.address}/{name}")]
        return bool(times) and s3.clock(self.address) - max(times) < seconds

    def launching(self) -> Launching | None:
        text = (s3.read(f"{self.address}/{FILE}") or b"").decode(errors="replace")
        asked = bool(s3.list_objects(f"{self.address}/asked/stop"))
        return replace(found, asked=asked) if (found := parse_launching(text)) else None

    def show(self, launching: Launching | None, obeyed: bool = False) -> None:
        """Writes or clears the launch record in S3.

        Does nothing if another machine writes concurrently, because the next query will return that
        machine's record.
        """
        address = f"{self.address}/{FILE}"
        if obeyed:
            s3.remove(f"{self.address}/asked/stop")
        before, version = s3.read_version(address) or (b"", "")
        text = before[:ROOM].ljust(ROOM) + launching_text(launching).encode()
        if text.strip():
            s3.write_if(address, text, version)
        else:
            s3.remove(address, version)

    def ask_to_stop(self) -> None:
        s3.write(f"{self.address}/asked/stop", str(time.time()).encode())

    def folders(self) -> dict[str, int]:
        """Returns the size in bytes of the run folder and of each other S3 address of the run."""
        sizes = {
            address: sum(found.size for found in s3.list_objects(f"{address}/"))
            for address in self.known
        }
        return {address: size for address, size in sizes.items() if size}

    def remove(self, folders: Iterable[str]) -> list[str]:
        left = []
        for address in folders:
            assert address in self.known, address
            found = [found.address for found in s3.list_objects(f"{address}/")]
            others = set(self._of_others(address, found) if address in self.datasets else ())
            s3.remove_all(object_ for object_ in found if object_ not in others)
            left += sorted(others)
        return left

    def _of_others(self, address: str, objects: Iterable[str]) -> list[str]:
        """Returns the objects below a dataset's address that this program did not write."""
        named = {object_: file_of(object_.removeprefix(f"{address}/")) for object_ in objects}
        strange = set(contents.strangers(contents.DATASET, named.values()))
        return [object_ for object_, name in named.items() if name in strange]

    def forward(self, verb: str, config: Config, variables: dict[str, str]) -> int | None:
        """Returns None, because any machine can read the files in S3.

        Downloads the run's small files first if this machine has no copy of the run yet.
        """
        if not self.run.config.exists():
            self.refresh()
        return None


def _is_launcher_s(name: str) -> bool:
    """Returns whether the launcher writes this file."""
    owned = name.startswith(("events/launcher", "logs/launcher")) or not is_node_s(name)
    return owned or is_asked(name) or bool(SHARED.fullmatch(name))


def unpacked(config: Config) -> Refusals:
    """Yields an error if the config names no image, for backends that run only images."""
    if config.fleet.container == "none":
        yield (
            "fleet.container",
            f"none: {config.fleet.backend} runs jobs in an image; set build, or an existing image",
        )


def unshared(config: Config) -> Refusals:
    """Yields an error for each configured folder outside S3, for backends without a shared disk."""
    for key, value, what in (
        ("fleet.shared_folder", config.fleet.shared_folder, "the run's small files"),
        ("data.tokenized_path", config.data.tokenized_path, "the dataset"),
        ("checkpoint.path", config.checkpoint.path, "checkpoints"),
    ):
        if not (value or "").startswith(s3.SCHEME):
            yield (
                key,
                f"{show(value)}: {config.fleet.backend} nodes have no shared disk; set "
                f"s3://bucket/prefix for {what}",
            )


def bucket_of(
    config: Config, run: Run, has_job: Callable[[], bool], consoles: Callable[[Path, str], None]
) -> BucketPlace:
    """Returns the run's Place. The config must have passed `unshared`."""
    fleet, data, checkpoint = config.fleet, config.data, config.checkpoint
    others = [f"{(checkpoint.path or '').rstrip('/')}/{run.name}"]
    return BucketPlace(
        run,
        fleet.shared_folder or "",
        data.name,
        data.tokenized_path or "",
        others,
        has_job,
        consoles,
    )
