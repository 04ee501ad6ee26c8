"""The speed of this machine's CPUs at matrix products, measured in about a second
(devices/matrix_products.py).

The number format that `train.precision: auto` comes to, the ranks of a node and MFU's peak follow
from it. It is taken once: the environment keeps it, for this CPU, this torch and so many cores. It
is a process of its own, as it needs torch.
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

from ..health.heartbeat_format import replace_file
from ..process.install_paths import CODE
from ..process.processes import die_with_parent
from ..trust.errors import InputError, RunError
from ..trust.untrusted_input import KIBIBYTE, parse_json, read_json, shortened
from ..trust.validation import Count, Name, Range, fit
from . import node_types

FILE = (
    "TRAINFLEET_TRIAL"  # names a file with the speed to go by, whatever machine it was measured on
)
PROGRAM = "trainfleet.devices"
LONGEST = 120.0  # seconds, on a machine that has much else to do
WORTH = 1.1  # another library is taken from so much on,
HALF_PAYS = 1.25  # bf16 from here, as tensors have to be cast for it,
APART_PAYS = (
    1.25  # and a rank per core from here, as ranks have gradients to exchange and an optimizer each
)
Rate = Annotated[float, Range(0, 1e18)]


@dataclass(frozen=True)
class CpuSpeed:
    """FLOP/s in products as training has them: forward, and both of backward.

    Of a core: `fp32` as torch computes it by itself, `onednn` the same by oneDNN (0 where its
    numbers are not those of fp32), and `bf16`. Of all cores, in the format and by the library that
    are fastest: `together` in one process, `apart` in one process a core; both 0 where the machine
    was too busy to tell.
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
        """Whether oneDNN should compute fp32 products."""
        return self.onednn > WORTH * self.fp32

    @property
    def half(self) -> bool:
        """Whether bf16 is the faster format."""
        return self.bf16 > HALF_PAYS * self.rate("fp32")

    @property
    def is_apart(self) -> bool:
        """Whether a rank per core is faster than one rank of all cores."""
        return self.apart > APART_PAYS * self.together

    def rate(self, format_: str) -> float:
        """FLOP/s of a core in products of that format."""
        return self.bf16 if format_ == "bf16" else max(self.fp32, self.onednn * self.by_onednn)

    def formats(self) -> str:
        """What speaks for a number format."""
        library = f" by oneDNN ({_giga(self.fp32)} without)" if self.by_onednn else ""
        return (
            f"products of a core: {_giga(self.bf16)} GFLOP/s in bf16, "
            f"{_giga(self.rate('fp32'))} in fp32{library}"
        )

    def processes(self) -> str:
        """What speaks for a rank per core, or against it."""
        if not self.together:
            return (
                "one process of all cores: the machine was too busy to compare it with one a core"
            )
        return (
            f"products of all cores: {_giga(self.together)} GFLOP/s in one process, "
            f"{_giga(self.apart)} in {self.cores}"
        )


def of_this_machine() -> CpuSpeed:
    """The speed that FILE names, or that was measured here before, or else one that is measured
    now.

    Raises:
        RunError: it could not be measured.
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
    """The speed measured now. Raises as `of_this_machine`."""
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
        # the last line is what went wrong
        what, why = ("the trial of this machine's CPUs failed", shortened(said[-1], 500))
        remedy = "make setup" if "ModuleNotFoundError" in why else f"{sys.executable} -m {PROGRAM}"
        raise RunError(what, where=PROGRAM, why=why, next=remedy) from error
    return fit(CpuSpeed, parse_json(done.stdout, PROGRAM), PROGRAM)


def cache_path() -> Path:
    """The file in which it is cached."""
    return Path(sys.prefix) / "trainfleet-trial.json"


def save(speed: CpuSpeed) -> None:
    """Caches it for later processes; where the environment can't be written, each takes its own."""
    with suppress(OSError):
        replace_file(cache_path(), (json.dumps(asdict(speed)) + "\n").encode())


def here() -> tuple[str, str, int]:
    """What a measurement here is one of: CPU, torch, cores."""
    from importlib.metadata import version  # takes 14 ms

    return cpu(), version("torch"), node_types.local_cores()


def identity(speed: CpuSpeed) -> tuple[str, str, int]:
    return speed.cpu, speed.torch, speed.cores


def cpu() -> str:
    """The identity of this CPU: its name, and a digest of model and instructions, as several can
    share a name.
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
