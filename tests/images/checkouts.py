"""A checkout that a test may change, whose image buildah builds; and what a test asks of buildah itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
CANARY = "canary-5e1f77"
Tell = Callable[[str], None]


def buildah(outside: dict[str, str], *words: str) -> str:
    return subprocess.run(
        ["buildah", *words], env=outside, check=True, capture_output=True, text=True, timeout=600
    ).stdout


class Checkout:
    """A copy of this checkout, which a test may change."""

    def __init__(self, folder: Path, outside: dict[str, str]) -> None:
        self.folder, self.outside = folder, outside | {"PYTHONPATH": str(folder / "python")}
        listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"], check=True,
                                capture_output=True, text=True).stdout.split()  # fmt: skip
        for name in listed:
            if not name.startswith("tests/") and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)

    def build(self, base: str) -> tuple[str, float]:
        """What make build says, and its seconds."""
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "trainfleet", "build", f"SET=fleet.container_base={base} fleet.secrets='[HF_TOKEN]'"],
                              cwd=self.folder, env=self.outside, capture_output=True, text=True, check=False, timeout=1800)  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr, time.monotonic() - began


def reference_in(said: str) -> str:
    return re.findall(r"(localhost/trainfleet:cpu-[0-9a-f]{16})", said)[-1]


def layers(outside: dict[str, str], reference: str) -> list[tuple[str, int]]:
    """The digest and bytes of each layer."""
    manifest = json.loads(
        json.loads(buildah(outside, "inspect", "--type=image", reference))["Manifest"]
    )
    return [(layer["digest"], layer["size"]) for layer in manifest["layers"]]
