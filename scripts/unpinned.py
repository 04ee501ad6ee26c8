"""Prints the Neuron packages that the given packages require but that are not installed.

Neuron's packages are pinned in docker/platforms.lock.yaml and come only from Neuron's index,
because the default index may have other packages with the same names.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

OWN = re.compile("neuron|nki|nrt", re.IGNORECASE)


def main(packages: list[str]) -> None:
    there = {plain(found.name) for found in metadata.distributions()}
    lines = [
        line
        for name in packages
        for line in metadata.requires(name) or ()
        if "extra ==" not in line
    ]
    asked = {plain(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) for line in lines}
    print(*sorted(name for name in asked - there if OWN.search(name)))


def plain(name: str) -> str:
    """Returns a package name in normalized form."""
    return re.sub("[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(sys.argv[1:])
