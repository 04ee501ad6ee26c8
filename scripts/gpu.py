"""Checks one GPU in about eight minutes: `python scripts/gpu.py [--minutes 2] [PART...]`. Needs no
network, and continues where it stopped.

Requires torch, numpy, transformers, tokenizers, safetensors, PyYAML, tensorboard and pytest.
`python scripts/gpu.py pack [PYTHON]` downloads the other packages that a bare CUDA image lacks to
.gpu/packages-PYTHON, which git ignores (PYTHON defaults to 3.12).

Each finished check is a line of .gpu/results.jsonl. Checks that passed are skipped unless --again
is set. Parts after `peers` run only if named. GPU_TESTS_ON=cpu runs all of them on a CPU, at
toy size.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".gpu"
LARGEST = 40 * 2**20  # maximum size of the packed folder, in bytes
# Packages that the tests and a single-node job import in addition to those of a CUDA image.
PACKED = (
    "rich",
    "markdown-it-py",
    "mdurl",
    "pygments",
    "zstandard",
    "pytest-timeout",
    "hypothesis",
    "sortedcontainers",
)
TAKEN = (
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "PyYAML",
    "tensorboard",
    "pytest",
)
TOY = os.environ.get("GPU_TESTS_ON") == "cpu"
FREE = 0.9  # minimum free fraction of the GPU's memory; if less is free, another process uses it


@dataclass(frozen=True)
class Check:
    """A Python command and its timeout. `shape`: the model shape of a benchmark
    (tests/bench/bench_gpu.py), or "" for tests.
    """

    part: str
    name: str
    words: tuple[str, ...]
    seconds: int
    shape: str = ""


def _tests(part: str, name: str, seconds: int, *words: str) -> Check:
    return Check(
        part,
        name,
        ("-m", "pytest", "-q", "--tb=short", "-rs", "-p", "no:cacheprovider", *words),
        seconds,
    )


def _bench(part: str, shape: str, who: str, seconds: int, *words: str) -> Check:
    size = "tiny" if TOY else shape
    steps = ("--steps", "8" if TOY else "25")
    command = ("tests/bench/bench_gpu.py", size, "--who", who, *steps, *words)
    return Check(part, " ".join((shape, who, *words)), command, seconds, shape)


PARITY, RUNS = "tests/gpu/test_parity.py", "tests/gpu/test_runs.py"
CHECKS = (
    _tests("first", "the device", 60, "tests/gpu/test_device.py"),
    _tests("first", "ten losses of Llama", 60, PARITY, "-k", "ten_steps and llama"),
    _bench("first", "1b", "ours", 120),
    _tests("runs", "ten losses of GPT-2 and BERT", 60, PARITY, "-k", "ten_steps and not llama"),
    _tests("runs", "killed and resumed", 120, RUNS, "-k", "killed and (bf16-compiled or fp32)"),
    _tests(
        "runs",
        "number formats",
        180,
        RUNS,
        "-k",
        "every_format and (bf16-compiled or fp16) and not weights",
    ),
    _tests(
        "runs",
        "documents, optimizers, checkpointing",
        120,
        PARITY,
        "-k",
        "cpus or optimizer or economies or chance",
    ),
    _bench("peers", "1b", "bare", 120),
    _bench("peers", "1b", "transformers", 120),
    _bench("3b", "3b", "ours", 240),
    _bench("8b", "8b", "ours", 240),
    _tests("fp8", "fp8", 240, PARITY, RUNS, "-k", "fp8"),
    _bench(
        "profile", "1b", "ours", 240, "--set", f"train.profile_steps={'4-6' if TOY else '12-14'}"
    ),
)
USUAL = ("first", "runs", "peers")
PARTS = tuple(dict.fromkeys(check.part for check in CHECKS))


def packages(version: str = f"{sys.version_info.major}.{sys.version_info.minor}") -> Path:
    """Returns the folder of the packed packages, per Python version because of C extensions."""
    return HOME / f"packages-{version}"


def pack(version: str) -> int:
    """Downloads PACKED for a Python version, pinned to the versions installed here. Returns the
    exit code.
    """
    folder = packages(version)
    shutil.rmtree(folder, ignore_errors=True)
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in PACKED]
    where = (
        "--target",
        str(folder),
        "--python-version",
        version,
        "--only-binary=:all:",
        "--no-deps",
        "--no-compile",
        "--quiet",
    )
    if code := subprocess.run(
        [sys.executable, "-m", "pip", "install", *where, *pinned], cwd=ROOT
    ).returncode:
        return code
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(
        f"{folder.relative_to(ROOT)}: {size / 2**20:.1f} MiB for Python {version}: "
        f"{' '.join(pinned)}"
    )
    return int(size > LARGEST)


def lacks() -> list[str]:
    """Returns one line per missing package or GPU problem."""
    found = [f"{name} is missing: pip install {name}" for name in TAKEN if not _version(name)]
    if not _version("torch"):
        return found
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = (
            f"its driver is missing or older than CUDA {built} needs: nvidia-smi"
            if built
            else "it is built without CUDA"
        )
        return [*found, f"torch {torch.__version__} sees no GPU: {why}"] if not TOY else found
    free, total = torch.cuda.mem_get_info()
    if free < FREE * total:
        found.append(
            f"another process has {(total - free) / 2**30:.0f} of {total / 2**30:.0f} GiB of the "
            "GPU: nvidia-smi"
        )
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def record(results: Path, line: dict[str, object]) -> None:
    """Appends a line to the results."""
    with results.open("a") as file:
        print(json.dumps(line), file=file)


def done(results: Path) -> dict[str, dict[str, object]]:
    """Returns each check's latest result at this size."""
    lines = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    return {line["check"]: line for line in lines if line.get("toy") == TOY}


def run(check: Check, folder: Path) -> dict[str, object]:
    """Runs a check, up to its timeout, and returns its record."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            map(str, (ROOT / "python", ROOT / "tests", ROOT / "scripts", packages()))
        ),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "REQUIRE_ALL": "",
    }
    # on a CPU, compiling takes longer
    began, seconds = (
        time.monotonic(),
        check.seconds * (5 if TOY else 1),
    )
    log = folder / f"{check.name.replace(' ', '-')}.log"
    words = (*check.words, "--folder", str(folder / "bench")) if check.shape else check.words
    with log.open("w") as file:
        try:
            code = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    said = log.read_text(errors="replace").splitlines()
    tables = [line for line in said if line.startswith("| ")]
    last = next((line.strip("= ") for line in reversed(said) if line.strip()), "")
    if not code and not check.shape and "passed" not in last:
        code = 5  # pytest's exit code if it ran no tests; all were skipped
    state = {0: "passed", 5: "skipped", 124: f"took more than {seconds} s"}.get(
        code, f"failed: {log}"
    )
    return {
        "check": check.name,
        "part": check.part,
        "toy": TOY,
        "state": state,
        "seconds": round(time.monotonic() - began, 1),
        "said": tables[1:] if check.shape else [last],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="minutes after which no further check starts"
    )
    parser.add_argument("--folder", type=Path, default=HOME, help="folder for results and logs")
    parser.add_argument("--again", action="store_true", help="also run checks that have passed")
    told = parser.parse_args()
    if told.parts[:1] == ["pack"]:
        return pack(told.parts[1] if told.parts[1:] else "3.12")
    if unknown := set(told.parts) - set(PARTS):
        parser.error(
            f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}, and pack"
        )
    told.folder.mkdir(exist_ok=True)
    results = told.folder / "results.jsonl"
    failed, missing = False, lacks()
    print(*(f"missing: {line}" for line in missing), sep="\n", end="\n" if missing else "")
    if not TOY and (not _version("torch") or any("sees no GPU" in line for line in missing)):
        return 1
    before = {} if told.again else done(results)
    record(
        results,
        {
            "environment": {name: _version(name) for name in TAKEN},
            "device": device(),
            "missing": missing,
            "time": time.time(),
        },
    )
    until = time.monotonic() + 60 * told.minutes
    for check in CHECKS:
        if check.part not in (told.parts or USUAL):
            continue
        found = before.get(check.name)
        if not found or found["state"] != "passed":
            if time.monotonic() > until:
                print(f"{check.name}: out of time; run the same command to continue")
                continue
            record(results, found := run(check, told.folder.absolute()))
        failed |= found["state"] not in ("passed", "skipped")
        print(
            f"{check.part:8} {check.name:38} {found['state']:10} {found['seconds']:>6} s",
            flush=True,
        )
        print(*(f"         {line}" for line in found["said"]), sep="\n", flush=True)  # type: ignore[attr-defined]
    return int(failed)


def device() -> str:
    """Returns the GPU's name, driver and memory, and torch's CUDA version."""
    if not shutil.which("nvidia-smi"):
        return "no nvidia-smi"
    words = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "python"), str(packages())]
    sys.exit(main())
