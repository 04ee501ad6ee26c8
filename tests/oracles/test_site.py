"""MkDocs builds the site of docs/ without a warning: every page is in its navigation, every link and heading is there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from requirement import missing

ROOT = Path(__file__).parents[2]


def test_the_site_builds_and_asks_no_other_server(tmp_path: Path) -> None:
    program = ROOT / ".venv-site/bin/mkdocs"
    if not program.exists():
        missing(
            "no mkdocs; python3 -m venv .venv-site && .venv-site/bin/pip install -r tests/oracles/site.txt"
        )
    command = [program, "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0 and not re.search("WARNING|ERROR", done.stderr), done.stderr
    page = (tmp_path / "site/index.html").read_text()
    assert "report.png" in page and "start/laptop/" in page
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://', page)
