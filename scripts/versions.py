"""Finds versions outside docker/platforms.lock.yaml (for everything below Python) and
pyproject.toml (for Python packages).

    python scripts/versions.py [FILE...]     all tracked files, or these

Prints one line per finding, and exits with 1 if there are any. A finding is a version that the lock
pins, anywhere. In scripts, Dockerfiles, recipes, CI, the Makefile and string literals, it is also
any other version: `VERSION=1.2.3`, `name==1.2`, a version in a file name, an image tag or digest.
Comments, docstrings and messages may mention versions.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
LOCKS = re.compile(
    r"docker/platforms\.lock\.yaml|pyproject\.toml|requirements[a-z-]*\.lock|tests/.*|scripts/versions\.py|.*/instance_types\.json|.*/skeleton/pyproject\.toml\.txt|.*\.(png|gz)"
)
PROSE = re.compile(r".*\.md")
TABLE = re.compile(r"/python/trainfleet/(?!recipes/).*\.yaml$")
DOTTED = r"\d+\.\d+(?:\.\d+)+(?:[a-z+.-][a-z0-9.]*)?"
PRODUCTS = (
    r"(?:torch|torchao|transformers|neuronx?|aws-neuronx|nki|efa|libfabric|rdma|nccl|cuda|cudnn|nvidia|driver|lustre|slurm|parallelcluster|"
    r"pip|pyyaml|boto3|numpy|uv|docker|ubuntu|debian|python)[a-z0-9_-]*"
)
VERSION = re.compile(
    rf"(?P<dotted>(?<![\w.]){DOTTED}(?!\w|\.\d))"  # 1.2.3
    rf"|(?P<pinned>[A-Za-z][\w.\[\]-]*(?:==|~=|>=)\d[\w.]*)"  # name==1.2
    rf"|(?P<named>\b{PRODUCTS}[ =:@v-]{{1,3}}\"?v?\d+\.\d+[\w.]*)"  # efa-1.2, CUDA_VERSION=12.6
    rf"|(?P<file>[a-z]+-v?{DOTTED}\.(?:tar|zip|run|whl|deb|rpm))"
    r"|(?P<image>[a-z0-9.]+/[a-z0-9./_-]+:[0-9][\w.-]*|@sha256:[0-9a-f]{64})",
    re.IGNORECASE,
)
ADDRESS = re.compile(r"(?:\d{1,3}\.){3}\d{1,3}(?:/\d+)?")
# versions that we run on but do not install
SAID = re.compile(r"Python(?:-version)? 3\.\d+|ubuntu 2\d\.04", re.IGNORECASE)


def pinned() -> set[str]:
    """Returns the locked versions with at least three parts; others could be ordinary numbers."""
    lock = yaml.safe_load((ROOT / "docker" / "platforms.lock.yaml").read_text())
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *python["dependencies"],
        *(line for lines in python["optional-dependencies"].values() for line in lines),
    ]
    found = {
        version
        for entry in (*lock["components"].values(), *lock["platforms"].values())
        for version in _versions(entry)
    }
    found |= {match[1] for line in lines if (match := re.search(r"==([\d.]+)", line))}
    return {version for version in found if version.count(".") >= 2 and not version.startswith("/")}


def _versions(entry: object) -> Iterator[str]:
    if isinstance(entry, dict):
        for key, value in entry.items():
            if key == "version":
                yield str(value)
            else:
                yield from _versions(value)


def find(path: Path, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, version) for each version in a file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    # the program and its tables, except recipes
    has_messages = path.suffix == ".py" or TABLE.search(str(path))
    for number, line in what_runs(path, text):
        for match in VERSION.finditer(SAID.sub("", ADDRESS.sub("", line))):
            # a message: "gone since NCCL 2.5"
            if not has_messages or not match["named"] or " " not in match["named"]:
                yield number, match[0]
    exact = re.compile(
        r"(?<![\w.])(?:"
        + "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
        + r")(?!\w|\.\d)"
    )
    for number, line in (
        what_runs(path, text) if path.suffix == ".py" else enumerate(text.splitlines(), 1)
    ):
        yield from ((number, match[0]) for match in exact.finditer(SAID.sub("", line)))


def what_runs(path: Path, text: str) -> Iterable[tuple[int, str]]:
    """Returns a file's numbered lines without comments, docstrings and descriptions."""
    if PROSE.fullmatch(path.name):
        return []
    if path.suffix == ".py":
        return _of_python(text)
    comment = (
        re.compile(r"(^|\s)#.*") if path.suffix not in (".json", ".html") else re.compile(r"(?!)")
    )
    lines = [(number, comment.sub("", line)) for number, line in enumerate(text.splitlines(), 1)]
    if path.suffix == ".json":  # a schema's descriptions are prose
        return [
            (number, line)
            for number, line in lines
            if '"description"' not in line and '"examples"' not in line
        ]
    return lines


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yields string literals, except docstrings and raw strings (patterns)."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        alone = before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)  # a docstring
        if token.type == tokenize.STRING and not alone and not token.string.startswith("r"):
            yield token.start[0], token.string
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type


def main(files: list[str]) -> int:
    command = ["git", "-C", str(ROOT), "ls-files"]
    listed = (
        files or subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
    known, wrong = pinned(), 0
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in listed:
        path = (ROOT / name).resolve()
        if LOCKS.fullmatch(name) or not path.is_file():
            continue
        for number, version in sorted({found for found in find(path, known) if found[1] != own}):
            wrong += 1
            print(
                f"{name}:{number}: {version}: a version outside the locks; "
                "docker/platforms.lock.yaml has them"
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
