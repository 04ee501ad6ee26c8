"""make release: builds the wheel and the sdist in dist/, installs the wheel in a clean environment,
and runs verbs there.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainfleet.trust.errors import RunError, TrainfleetError, tell

ROOT = Path(__file__).parents[1]
DIST = Path("dist")
PLACEHOLDER = "git.example"  # placeholder for the repository's host until a release
# commands to run in the clean environment
TYPED = (
    ("--version",),
    ("recipes",),
    ("config", "RECIPE=first-run"),
    ("plan",),
)


def main() -> int:
    number = project()["project"]["version"]
    refuse_unready(number)
    wheel, sdist = build(DIST)
    with TemporaryDirectory() as folder:
        check(wheel, Path(folder), ["--require-hashes", "-r", str(ROOT / "requirements.lock")])
    print(f"{wheel}\n{sdist}\nnext: git tag -a v{number} -m 'trainfleet {number}'")
    return 0


def project() -> dict[str, Any]:
    """Returns the [project] table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def refuse_unready(number: str) -> None:
    """Raises RunError if the checkout has uncommitted changes or placeholders for the repository's
    address, or if the version's section of CHANGELOG.md has no date.
    """
    if changed := _run("git", "status", "--porcelain").splitlines():
        raise RunError(
            "has changes that no commit has",
            where=str(ROOT),
            why="; ".join(changed[:5]),
            next="git commit",
        )
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("pyproject.toml")]
    if unset := [
        str(page.relative_to(ROOT))
        for page in pages
        if PLACEHOLDER in page.read_text(encoding="utf-8")
    ]:
        then = (
            f"sed -i 's|{PLACEHOLDER}|github.com/you|' {' '.join(unset)}, with your host; "
            "correct the address in SECURITY.md"
        )
        raise RunError(
            "have a placeholder for the repository's address",
            where=", ".join(unset),
            why=PLACEHOLDER,
            next=then,
        )
    heading = f"## {number} ("
    titles = [
        line
        for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(heading)
    ]
    if not titles or "unreleased" in titles[0]:
        why = f"no line begins with '{heading}' and has a date"
        raise RunError(
            "does not date this version",
            where="CHANGELOG.md",
            why=why,
            next=f"write '{heading}2026-12-31)', with today's date",
        )


def build(folder: Path) -> tuple[Path, Path]:
    """Builds the wheel and the sdist with the pinned hatchling, in a separate environment."""
    asked = project()
    with TemporaryDirectory() as tools:
        _run(
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            tools,
            *asked["build-system"]["requires"],
        )
        code = (
            "import sys; sys.path.insert(0, sys.argv.pop(1)); from hatchling.cli import "
            "hatchling; sys.exit(hatchling())"
        )
        _run(sys.executable, "-c", code, tools, "build", "--directory", str(folder.absolute()))
    name = f"trainfleet-{asked['project']['version']}"
    return folder / f"{name}-py3-none-any.whl", folder / f"{name}.tar.gz"


def check(wheel: Path, folder: Path, requirements: Sequence[str]) -> None:
    """Installs the requirements and the wheel in a new environment, and runs verbs in it."""
    venv.create(folder / "env", with_pip=False)
    python, desk = folder / "env/bin/python", folder / "desk"
    desk.mkdir()
    for packages in (requirements, ["--no-deps", str(wheel.absolute())]):
        if packages:
            _run(
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(python),
                "install",
                "--quiet",
                *packages,
            )
    for words in TYPED:
        _run(str(folder / "env/bin/trainfleet"), *words, folder=desk)


def _run(*command: str, folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder or ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(
            "failed",
            where=" ".join(command[:4]),
            why=(done.stderr or done.stdout).strip()[-2000:],
            next="make release again",
        )
    return done.stdout


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TrainfleetError as error:
        sys.exit(tell(error))
