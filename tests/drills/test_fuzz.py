"""A minute of searching for inputs that break what reads strangers' text (tests/fuzz); an hour of it was run when it was made.

A longer search of one target: python -m fuzz.guided configs 3600 build/fuzz, as `command` below runs it.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from fuzz import targets
from requirement import missing

ROOT = Path(__file__).parents[2]
SECONDS = 60 // len(targets.TARGETS)


def command(target: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The words and the environment of a search."""
    python = Path(os.environ.get("FUZZ_PYTHON", ROOT / ".venv-fuzz/bin/python"))
    if not python.exists():
        missing(
            "no atheris; python3 -m venv .venv-fuzz && .venv-fuzz/bin/pip install -r tests/fuzz/atheris.txt"
        )
    path = [ROOT / "python", ROOT / "tests", sysconfig.get_path("purelib")]
    return [str(python), "-m", "fuzz.guided", target, str(SECONDS), str(folder)], {
        "PYTHONPATH": os.pathsep.join(map(str, path))
    }


@pytest.mark.parametrize("target", targets.TARGETS)
def test_a_search_led_by_coverage_finds_nothing(target: str, tmp_path: Path) -> None:
    words, environment = command(target, tmp_path)
    done = subprocess.run(
        words, capture_output=True, env=os.environ | environment, cwd=ROOT, check=False
    )
    said = done.stderr.decode(errors="replace")
    found = [path.read_bytes() for path in tmp_path.iterdir() if path.is_file()]
    assert done.returncode == 0 and not found, (
        f"{target}: {found}; add it to tests/unit/test_fuzz_finds.py\n{said[-3000:]}"
    )
    assert "stat::number_of_executed_units" in said, said[-3000:]


def test_a_search_finds_what_is_broken(tmp_path: Path) -> None:
    """The search itself can fail: a reader that breaks behind three bytes of a form is found out."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "def broken(content):\n"
        "    if content[:1] == b'{' and content[1:2] == b'!' and content[2:3] == b'?':\n"
        "        raise KeyError(content)\n"
    )
    words, environment = command("untrusted_input", tmp_path / "out")
    code = "import atheris, sitecustomize, sys; atheris.instrument_func(sitecustomize.broken); atheris.Setup([sys.argv[0], '-max_total_time=60'], atheris.instrument_func(sitecustomize.broken)); atheris.Fuzz()"
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    done = subprocess.run(
        [words[0], "-c", code],
        capture_output=True,
        env=os.environ | environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode and b"KeyError" in done.stderr + done.stdout, done.stderr[-2000:]
