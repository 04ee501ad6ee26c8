"""`make test` on a machine that is set up against it: what pip, the shell and the kernel are told there is not what tests go by."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = "[global]\nconstraint = /none/constraints.txt\nextra-index-url = file:///none/simple\n"
# In namespaces of its own: no IPv6, shared memory of 64 MiB, a home that can't be written, files for their owner only.
MACHINE = """
ip link set lo up
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount --bind "$HOME" "$HOME"
mount -o remount,bind,ro "$HOME"
umask 077
exec make test
"""


@pytest.mark.timeout(3000)
def test_make_test_passes_on_a_machine_that_is_set_up_against_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".config/pip").mkdir(parents=True)
    (home / ".config/pip/pip.conf").write_text(PIP)
    environment = os.environ | {"HOME": str(home), "LANG": "C", "LC_ALL": "C", "http_proxy": "http://127.0.0.1:9",
                                "https_proxy": "http://127.0.0.1:9", "PIP_CONSTRAINT": "/none/constraints.txt"}  # fmt: skip
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONUTF8"):
        environment.pop(name, None)
    words = ["unshare", "--mount", "--net", "sh", "-eu", "-c", MACHINE]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert re.search(r"\d+ passed", done.stdout)
