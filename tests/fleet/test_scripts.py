"""scripts/*.sh under bats (tests/scripts/scripts.bats): one result a test of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from requirement import need_program

BATS = Path(__file__).parents[1] / "scripts" / "scripts.bats"


def test_the_scripts_do_what_they_say() -> None:
    need_program("fi_info", "apt-get install libfabric-bin")
    done = subprocess.run(
        [need_program("bats", "apt-get install bats"), str(BATS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
