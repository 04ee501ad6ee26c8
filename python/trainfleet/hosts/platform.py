"""Reads a platform's pinned versions, including drivers and system packages, from
docker/platforms.lock.yaml, and checks that the package indexes used by setup and image builds still
have them.

The check needs no account. PyPI is skipped: nodes may use a mirror, PyPI does not delete files, and
the locks contain their hashes. If an index does not respond, that is reported, but its pins count
as available. After a successful check, the same pins are not checked again for a day. OFFLINE=1
disables the check.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..config import Config
from ..process.install_paths import ROOT, page
from ..trust.errors import BackendError, TrainfleetError

LOCK = ROOT / "docker" / "platforms.lock.yaml"
# Python tag (cp312) → SHA-256 of the package's wheel
Sums = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class System:
    """Operating system of nodes or images.

    `python` is the version that setup installs. `apt` is the release name in apt, or "" for
    RPM-based systems.
    """

    python: str
    apt: str


@dataclass(frozen=True)
class PinnedPlatform:
    """Versions that every node of a fleet must have.

    Empty values mean that the platform does not include the component.
    """

    name: str
    torch: str
    torch_index: str
    ami: str = ""  # SSM parameter or name of a machine image
    ecs: str = ""  # name of the machine image for AWS Batch
    base: str = ""  # base image of the container images, by digest
    read: str = ""  # date when the lock was last updated
    libfabric: str = ""  # libfabric version in the EFA installer
    cuda: str = ""
    nccl: str = ""
    nvidia: str = ""  # driver branch to install on nodes without a driver
    nvidia_least: str = ""  # minimum driver version in a machine image
    nvidia_below: str = "-"  # exclusive upper bound for the driver version, or - for none
    kernel_modules: str = ""  # type of NVIDIA kernel modules: open or proprietary
    efa: str = ""  # EFA installer version
    efa_least: str = ""  # minimum EFA installer version in a machine image
    ofi_nccl: str = ""  # minimum version of the NCCL plugin for EFA
    neuron_sdk: str = ""
    neuron_index: str = ""
    python: str = ""  # minimum Python version of the packages, if it differs from trainfleet's
    neuron_packages: tuple[tuple[str, str], ...] = ()  # names and versions of system packages
    python_packages: tuple[tuple[str, str], ...] = ()  # torch dependencies from neuron_index
    checked_packages: tuple[tuple[str, str, Sums], ...] = ()  # PyPI packages, with hashes
    torch_wheels: Sums = ()  # wheels from torch_index, if they differ from requirements.lock
    torch_cpu_wheels: Sums = ()  # CPU-only torch wheels from PyTorch's index
    # fingerprints of the keys that sign repositories and installers
    keys: tuple[tuple[str, str], ...] = ()

    def key(self, name: str) -> str:
        """Returns the fingerprint of the signing key `name`."""
        return dict(self.keys)[name]


def load_platform(name: str) -> PinnedPlatform:
    """Returns the platform `name`.

    Raises TrainfleetError if the lock can't be read or does not contain the platform.
    """
    lock = _read()
    platforms = lock["platforms"]
    if name not in platforms:
        what = f"unknown platform {name}; the lock has {', '.join(platforms)}"
        then = f"see fleet.platform in {page('schema/README.md')}"
        raise TrainfleetError(what, where=str(LOCK), next=then)
    keys = tuple((key, str(entry["fingerprint"])) for key, entry in lock["keys"].items())
    return replace(_build(name, platforms[name]), keys=keys, read=str(lock.get("read", "")))


def load_system(name: str) -> System:
    """Returns an operating system by the name that ParallelCluster uses for it."""
    row = _read()["systems"][name]
    return System(row["python"], row["apt"])


@functools.cache
def _read() -> dict[str, Any]:
    import yaml

    try:
        lock: dict[str, Any] = yaml.safe_load(LOCK.read_text(encoding="utf-8"))
        return {key: lock[key] for key in ("read", "keys", "systems", "platforms")}
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise TrainfleetError(
            "can't read the version lock",
            where=str(LOCK),
            why=str(error),
            next=f"git checkout {LOCK}",
        ) from error


def _build(name: str, entry: dict[str, Any]) -> PinnedPlatform:
    known = {field.name for field in fields(PinnedPlatform)}
    found: dict[str, Any] = {"name": name}
    for key, value in entry.items():
        parts = value if isinstance(value, dict) else {"version": value}
        # flatten nested keys, for example into nvidia_least
        flat = {f"{key}_{part}": _plain(inner) for part, inner in parts.items()}
        row = key, str(parts["version"]), flat.get(f"{key}_wheels", ())
        found |= {part: inner for part, inner in flat.items() if part in known}
        if key in known:
            found[key] = row[1]
        elif key.startswith("aws-neuronx-"):
            found["neuron_packages"] = (*found.get("neuron_packages", ()), row[:2])
        elif row[2]:
            found["checked_packages"] = (*found.get("checked_packages", ()), row)
        else:
            found["python_packages"] = (*found.get("python_packages", ()), row[:2])
    return PinnedPlatform(**found)


def _plain(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, dict) else str(value)


SECONDS, DAY = 3.0, 86400.0
MOST = 1 << 24  # maximum bytes per page; Neuron's package list is about 100 KB
EFA = "https://efa-installer.amazonaws.com/aws-efa-installer-{}.tar.gz"
APT = "https://apt.repos.neuron.amazonaws.com/dists/{}/main/binary-amd64/Packages"
DRIVER = "aws-neuronx-dkms"  # driver package that only hosts need, not images
IMAGE = "ubuntu2404"  # operating system of the Docker base images
DOCKER = "https://registry-1.docker.io/v2/{}/manifests/{}"
# URL that issues the token required to read a manifest:
# https://distribution.github.io/distribution/spec/auth/token/
LEAVE = "https://auth.docker.io/token?service=registry.docker.io&scope=repository:{}:pull"
MANIFEST = (
    "application/vnd.oci.image.index.v1+json, "
    "application/vnd.docker.distribution.manifest.list.v2+json"
)
# found on real index pages, but not on a proxy's login page
INDEX = re.compile(r"\.whl|^Package: |\A(?!text/html)[\w.+-]+/[\w.+-]+\Z", re.MULTILINE)
ABSENT = "is missing"
STRANGE = "is unknown: the response is not an index page; check whether a proxy requires a login"
# page text, the error that prevented reading it, or None if the page does not exist
Answer = str | Exception | None


@dataclass(frozen=True)
class Pin:
    """Pinned version or file.

    `page` is the index page that lists it, and `pattern` matches its entry on that page.
    """

    what: str
    page: str
    pattern: str = ""

    def lack(self, text: str | None) -> str:
        """Returns why the pin is missing from the page, or "" if it is listed."""
        if text is None:
            return ABSENT
        if not INDEX.search(text):
            return STRANGE
        return "" if re.search(self.pattern, text, re.MULTILINE) else ABSENT


def pins_of(config: Config, nodes: str, builds: bool) -> tuple[Pin, ...]:
    """Returns the pins that setup or an image build requires.

    `nodes` is the operating system of the nodes that setup creates, or "" if it creates none.
    """
    fleet, found = config.fleet, list[Pin]()
    if nodes:
        platform, system = load_platform(fleet.platform), load_system(nodes)
        found += packages(platform, system, in_image=False)
        found += (
            wheels(platform, system.python)
            if fleet.container == "none" and not fleet.python
            else ()
        )
    if builds and not fleet.container_base:  # a custom base image has an unknown operating system
        platform, system = load_platform(fleet.platform), load_system(IMAGE)
        # the base image's digest identifies it
        name, _, digest = platform.base.removeprefix("docker.io/").partition("@")
        found += [
            Pin(platform.base, DOCKER.format(name.rpartition(":")[0], digest)),
            *packages(platform, system, in_image=True),
            *wheels(platform, system.python),
        ]
    return tuple(dict.fromkeys(found))


def report_pins(wanted: Sequence[Pin]) -> list[str]:
    """Runs the check and prints its result. Returns an error for each unavailable pin."""
    if not wanted:
        return []
    wrong, unasked = ask(wanted)
    said = [*wrong, *unasked] or [f"all {len(wanted)} pinned versions are available"]
    print(*(f"pins: {line}" for line in said), sep="\n", flush=True)
    return wrong


def require_pins(wanted: Sequence[Pin]) -> None:
    """Raises BackendError if a pinned version is unavailable.

    Setup calls this before it creates any resources.
    """
    if wrong := report_pins(wanted):
        raise BackendError(
            f"{len(wrong)} pinned versions are unavailable",
            why=wrong[0],
            next="fix docker/platforms.lock.yaml, or set OFFLINE=1 to skip this check",
        )


def wheels(platform: PinnedPlatform, python: str) -> Iterator[Pin]:
    """Yields the pins of wheels from indexes other than PyPI. torch's pin includes its SHA-256."""
    tag = f"cp{python.replace('.', '')}"
    rows = [
        (platform.neuron_index, name, version, "") for name, version in platform.python_packages
    ]
    if platform.torch_index != "-":
        rows.append(
            (
                platform.torch_index,
                "torch",
                platform.torch,
                f"#sha256={dict(platform.torch_wheels or platform.torch_cpu_wheels)[tag]}",
            )
        )
    for index, name, version, sum_ in rows:
        stem = f"{name.replace('-', '_')}-{re.escape(version)}"
        yield Pin(
            f"{name} {version} for Python {python}{sum_ and ' with the locked hash'}",
            f"{index}/{name}/",
            rf"\b{stem}((%2B|\+)[\w.]+)?-({tag}|py3)-\w+-(any|\w*linux\w*x86_64)\.whl{sum_}",
        )


def packages(platform: PinnedPlatform, system: System, in_image: bool) -> Iterator[Pin]:
    """Yields the pins of system packages for a node or image."""
    for name, version in platform.neuron_packages:
        if not (in_image and name == DRIVER):
            stanza = rf"^Package: {name}\n(.+\n)*?Version: {re.escape(version)}([-~+].*)?$"
            yield Pin(f"{name} {version}", APT.format(system.apt), stanza)
    if platform.efa:
        yield Pin(f"EFA installer {platform.efa}", EFA.format(platform.efa))


def ask(wanted: Sequence[Pin]) -> tuple[list[str], list[str]]:
    """Queries the indexes. Returns errors about missing pins, and a note about unresponsive
    indexes.
    """
    if os.environ.get("OFFLINE", "0") not in ("", "0"):
        return [], ["not checked: OFFLINE=1"]
    mark = mark_of(wanted)
    if mark.exists() and time.time() - mark.stat().st_mtime < DAY:
        return [], []
    answers = read_pages({pin.page for pin in wanted})
    lacks = {
        pin: pin.lack(found)
        for pin in wanted
        if not isinstance(found := answers[pin.page], Exception)
    }
    wrong = [f"{pin.what} at {pin.page} {lack}" for pin, lack in lacks.items() if lack]
    failed = {
        urlsplit(page).netloc: getattr(why, "reason", why)
        for page, why in answers.items()
        if isinstance(why, Exception)
    }
    if not wrong and not failed:
        with suppress(OSError):  # without this file, the next check queries the indexes again
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    why = "; ".join(f"{host}: {reason}" for host, reason in sorted(failed.items()))
    return wrong, [f"not checked: {why}"] if failed else []


def mark_of(wanted: Sequence[Pin]) -> Path:
    """Returns the file whose modification time records the last successful check of these pins."""
    kept = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "trainfleet").expanduser()
    return kept / f"pins-{hashlib.sha256(repr(wanted).encode()).hexdigest()[:16]}"


def read_pages(pages: Iterable[str]) -> dict[str, Answer]:
    """Reads all pages in parallel, within a total of SECONDS."""
    answers: dict[str, Answer] = dict.fromkeys(pages, TimeoutError(f"no answer in {SECONDS:.0f} s"))
    threads = [
        threading.Thread(target=_read_page, args=(page, answers), daemon=True) for page in answers
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)


def _read_page(page: str, answers: dict[str, Answer]) -> None:
    # deferred until an index is queried, because this import takes 70 ms
    from http.client import HTTPException

    try:
        answers[page] = read_page(page)
    except (OSError, ValueError, LookupError, TypeError, HTTPException) as error:
        code = getattr(error, "code", 0)
        # S3 returns 403 instead of 404 for a missing object.
        is_of_s3 = code == 403 and "x-amz-request-id" in getattr(error, "headers", ())
        answers[page] = None if is_of_s3 or code in (404, 410) else error


def read_page(page: str) -> str:
    """Returns the text of an index page, or the content type of a file or manifest."""
    if page.endswith(("/", "/Packages")):
        return _open(page)[0].decode(errors="replace")
    headers = {}
    if "/manifests/" in page:
        token = json.loads(
            _open(LEAVE.format(page.split("/v2/")[1].partition("/manifests/")[0]))[0]
        )["token"]
        headers = {"Accept": MANIFEST, "Authorization": f"Bearer {token}"}
    return _open(page, headers=headers, method="HEAD")[1]


def _open(page: str, **more: Any) -> tuple[bytes, str]:
    from urllib.request import Request, urlopen

    with urlopen(Request(page, **more), timeout=SECONDS) as answer:
        return answer.read(MOST), answer.headers.get_content_type()
