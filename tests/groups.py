"""make drills: the slow tests in named groups (groups.yaml).

`make drills` lists them, ONLY='heads slurm' or ONLY=all plays some, and CHANGED=1 plays those that guard what differs from the
origin. `python tests/groups.py table` writes CONTRIBUTING.md's table.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from trainfleet.cli.variables import read_variables
from trainfleet.trust.errors import TrainfleetError
from trainfleet.trust.spelling import suggest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- made by tests/groups.py -->\n", "<!-- end of the groups -->"


@dataclass(frozen=True)
class Group:
    tests: list[str]
    guards: list[str]
    minutes: int
    needs: tuple[str, ...] = ()


GROUPS = {
    name: Group(**row)
    for name, row in yaml.safe_load((ROOT / "tests" / "groups.yaml").read_text()).items()
}


def part_of(path: str) -> str:
    """Returns the part of the project that a path of the checkout belongs to, as groups.yaml names it."""
    first, *rest = Path(path).parts
    if first == "python" and rest:
        return rest[1] if rest[0] == "trainfleet" and len(rest) > 1 else rest[0]
    return first


def changed_groups() -> list[str]:
    """Returns the groups that guard or hold a file which differs from the origin's main branch."""
    base = git("merge-base", "HEAD", "origin/HEAD") or git("merge-base", "HEAD", "origin/main")
    if not base:
        raise TrainfleetError(
            "this checkout has no origin to compare with",
            next="git fetch origin, or make drills ONLY=...",
        )
    paths = [
        *git("diff", "--name-only", base[0]),
        *git("ls-files", "--others", "--exclude-standard"),
    ]
    parts = {part_of(path) for path in paths}
    return [
        name
        for name, group in GROUPS.items()
        if parts & set(group.guards) or set(paths) & set(group.tests)
    ]


def git(*words: str) -> list[str]:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
    ).stdout.split()


def chosen(variables: dict[str, str]) -> list[str]:
    if variables.get("CHANGED"):
        return changed_groups()
    names = variables.get("ONLY", "").split()
    for name in names:
        if name not in ("all", *GROUPS):
            raise TrainfleetError(
                f"drills have no group {name}{suggest(name, GROUPS)}",
                next="make drills lists the groups",
            )
    return list(GROUPS) if "all" in names else names


def play(name: str) -> bool:
    """Runs a group, and prints its minutes."""
    group, began = GROUPS[name], time.monotonic()
    print(f"drills: {name}, about {group.minutes} minutes", flush=True)
    commands = [["tests/oracles/environments.sh", *group.needs]] if group.needs else []
    commands.append(
        [sys.executable, "-m", "pytest", "-q", "--durations=8", "--timeout=600", *group.tests]
    )
    passed = all(
        subprocess.run(command, cwd=ROOT, check=False).returncode == 0 for command in commands
    )
    print(
        f"drills: {name} {'passed' if passed else 'FAILED'} in {(time.monotonic() - began) / 60:.1f} minutes",
        flush=True,
    )
    return passed


def table() -> str:
    rows = [
        f"| `{name}` | {', '.join(group.guards)} | {group.minutes} |"
        for name, group in GROUPS.items()
    ]
    return "\n".join([BEGIN, "| group | guards | minutes |", "|---|---|---|", *rows, "", END])


def main(words: list[str]) -> int:
    if words == ["table"]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + table() + rest.partition(END)[2])
        return 0
    try:
        variables = read_variables("drills", ("ONLY", "CHANGED"), words)
        names = chosen(variables)
    except TrainfleetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if not names:
        asked = variables.get("CHANGED")
        print(
            "no group guards what has changed"
            if asked
            else "make drills ONLY='group ...', ONLY=all or CHANGED=1:"
        )
        for name, group in GROUPS.items() if not asked else ():
            print(f"  {name:<12} {group.minutes:>3} min  {', '.join(group.guards)}")
        return 0
    failed = [name for name in names if not play(name)]
    print(
        f"drills: {len(names) - len(failed)} of {len(names)} groups passed",
        *(f"; failed: {', '.join(failed)}" for _ in failed[:1]),
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
