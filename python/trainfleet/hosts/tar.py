"""Packs files into an in-memory tar archive, and collects this checkout's code."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from ..process import plugins
from ..process.install_paths import PACKAGES, ROOT

LOCKS = ("requirements.lock", "requirements-cuda.lock")
PARTS = (
    "schema",
    "scripts",
    "docker",
    "pyproject.toml",
    *LOCKS,
)  # files that a job needs on a node in addition to Python code


def pack(files: Mapping[str, bytes]) -> bytes:
    """Returns a compressed tar archive of the files.

    The archive is reproducible, because it contains no timestamps or owners.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if content.startswith(b"#!") else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def code_files(backend: str) -> dict[str, bytes]:
    """Returns this checkout's code and a third-party backend's package, as relative path → content.

    Excludes hidden files, caches and a wheel's `checkout` folder.
    """
    packages, metadata = plugins.sources(plugins.OF_BACKENDS, backend)
    beside = {
        path.relative_to(ROOT): path
        for name in PARTS
        for path in (ROOT / name, *(ROOT / name).rglob("*"))
    }
    own = {
        Path("python") / path.relative_to(package.parent): path
        for package in (*PACKAGES, *packages)
        for path in (package, *package.rglob("*"))
    }
    return metadata | {
        str(name): path.read_bytes()
        for name, path in sorted((beside | own).items())
        if path.is_file()
        and not {"__pycache__", "checkout"} & set(name.parts)
        and not path.name.startswith(".")
    }


def content_hash(files: Mapping[str, bytes]) -> str:
    """Returns a hash of all names and contents, as 16 hex digits."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
