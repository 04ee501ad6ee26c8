"""Measured matmul throughput of this machine's CPUs.

It determines the dtype of `train.precision: auto`, the number of ranks per node, and the peak
FLOP/s for MFU. The measurement (devices/cpu.py) takes about a second, in a separate process because
it needs torch. The result is cached in the Python environment for this CPU model, torch version and
core count.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from ..process.file_systems import replace_file
from ..process.install_paths import CODE
from ..process.processes import die_with_parent
from ..trust.errors import InputError, RunError
from ..trust.untrusted_input import KIBIBYTE, parse_json, read_json, shortened
from ..trust.validation import Count, Name, Range, fit
from . import node_types

# Environment variable with the path of a result to use instead, which may be from another machine.
FILE = "TRAINFLEET_TRIAL"
PROGRAM = "trainfleet.devices"
LONGEST = 120.0  # timeout in seconds, long enough for a busy machine
WORTH = 1.1  # minimum speedup for using oneDNN
HALF_PAYS = 1.25  # minimum speedup for using bf16, because casts take time
# Minimum speedup for using one rank per core, because ranks exchange gradients and each runs an
# optimizer.
APART_PAYS = 1.25
Rate = Annotated[float, Range(0, 1e18)]


@dataclass(frozen=True)
class CpuSpeed:
    """Measured FLOP/s of training matmuls, one forward and two backward.

    The first three are per core: `fp32` with torch's default library, `onednn` with oneDNN, and
    `bf16` in that dtype. `onednn` is 0 if its results lack fp32 accuracy.

    The other two are totals of all cores, with the fastest dtype and library: `together` with one
    process, and `apart` with one process per core. Both are 0 if the machine was too busy to
    measure.
    """

    cpu: Name
    torch: Name
    cores: Count
    fp32: Rate
    onednn: Rate
    bf16: Rate
    together: Rate = 0.0
    apart: Rate = 0.0

    @property
    def by_onednn(self) -> bool:
        """Returns whether to use oneDNN for fp32 matmuls."""
        return self.onednn > WORTH * self.fp32

    @property
    def half(self) -> bool:
        """Returns whether bf16 is enough faster than fp32 to be worth its casts."""
        return self.bf16 > HALF_PAYS * self.rate("fp32")

    @property
    def is_apart(self) -> bool:
        """Returns whether one rank per core is faster than one rank for all cores."""
        return self.apart > APART_PAYS * self.together

    def rate(self, format_: str) -> float:
        """Returns a core's matmul FLOP/s in a dtype."""
        return self.bf16 if format_ == "bf16" else max(self.fp32, self.onednn * self.by_onednn)

    def formats(self) -> str:
        """Explains the dtype choice by quoting the measurements."""
        library = f" with oneDNN ({_giga(self.fp32)} without)" if self.by_onednn else ""
        return (
            f"matrix products on one core: {_giga(self.bf16)} GFLOP/s in bf16, "
            f"{_giga(self.rate('fp32'))} in fp32{library}"
        )

    def processes(self) -> str:
        """Explains the choice of one process, or one per core, by quoting the measurements."""
        if not self.together:
            return "one process for all cores: the machine was too busy to measure one per core"
        return (
            f"matrix products on all cores: {_giga(self.together)} GFLOP/s in one process, "
            f"{_giga(self.apart)} in {self.cores} processes"
        )


def of_this_machine() -> CpuSpeed:
    """Returns the speed from FILE or the cache, or measures and caches it.

    Raises:
        RunError: the measurement failed.
    """
    return _taken(os.environ.get(FILE, ""))


@cache
def _taken(named: str) -> CpuSpeed:
    path = Path(named or cache_path())
    with suppress(FileNotFoundError, InputError):
        found = fit(CpuSpeed, read_json(path, 4 * KIBIBYTE), str(path))
        if named or identity(found) == here():
            return found
    save(found := measure())
    return found


def measure() -> CpuSpeed:
    """Measures the speed, bypassing the cache. Raises RunError if the measurement fails."""
    words, path = (
        [sys.executable, "-m", PROGRAM],
        os.pathsep.join(filter(None, (str(CODE), os.environ.get("PYTHONPATH")))),
    )
    try:
        done = subprocess.run(
            words,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=True,
            preexec_fn=die_with_parent,
        )
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines() or [str(error)]
        # the last line is the error
        what, why = ("can't measure the speed of this machine's CPUs", shortened(said[-1], 500))
        remedy = "make setup" if "ModuleNotFoundError" in why else f"{sys.executable} -m {PROGRAM}"
        raise RunError(what, where=PROGRAM, why=why, next=remedy) from error
    return fit(CpuSpeed, parse_json(done.stdout, PROGRAM), PROGRAM)


def cache_path() -> Path:
    """Returns the path of the cached result."""
    return Path(sys.prefix) / "trainfleet-trial.json"


def save(speed: CpuSpeed) -> None:
    """Caches the result. If the environment is read-only, each process measures again."""
    with suppress(OSError):
        replace_file(cache_path(), (json.dumps(asdict(speed)) + "\n").encode())


def here() -> tuple[str, str, int]:
    """Returns this machine's cache key: CPU, torch version and core count."""
    from importlib.metadata import version  # the import takes 14 ms

    return cpu(), version("torch"), node_types.local_cores()


def identity(speed: CpuSpeed) -> tuple[str, str, int]:
    return speed.cpu, speed.torch, speed.cores


def cpu() -> str:
    """Identifies this CPU by its name and a digest of model and instructions.

    The digest is needed because different CPUs can share a name.
    """
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return "CPU"
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", first, re.MULTILINE))
    digest = hashlib.sha256(
        " ".join(
            fields.get(name, "") for name in ("cpu family", "model", "stepping", "flags")
        ).encode()
    )
    return f"{fields.get('model name', 'CPU')} {digest.hexdigest()[:8]}"


def _giga(rate: float) -> str:
    return f"{rate / 1e9:,.0f}"
