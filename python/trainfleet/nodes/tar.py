"""Files as one compressed tar in memory, and the code of this checkout as such files."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

LOCKS = ("requirements.lock", "requirements-cuda.lock")
CODE = ("python", "schema", "scripts", "docker", "pyproject.toml", *LOCKS)  # what a node needs to run a job
ROOT = Path(__file__).parents[3]


def pack(files: Mapping[str, bytes]) -> bytes:
    """The same bytes for the same files: no times and no owners in it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if content.startswith(b"#!") else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def code_files(root: Path = ROOT) -> dict[str, bytes]:
    """The program as it stands in this checkout: relative path → content, without what Python and editors leave behind."""
    paths = [path for name in CODE for path in ([root / name] if (root / name).is_file() else sorted((root / name).rglob("*")))]
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


def content_hash(files: Mapping[str, bytes]) -> str:
    """16 hex digits that change with any name or byte."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
