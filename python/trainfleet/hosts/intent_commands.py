"""Shell commands that leave, read and remove the intent of a launch in a fleet's shared folder, for
one host. Pure.

What `read_found` is given: when the file was touched and whether a stop was asked for, in a line,
then the file.
"""

from __future__ import annotations

import re
import shlex

from ..run.contents import INTENT
from ..run.launch_intent import DeclaredIntent, Intent, parse
from .host_results import Implausible

READ = """[ -s {file} ] || exit 0
echo "$(stat -c %Y {file}) $([ -e stop ] && ! grep -qs ^engine: stop && echo asked || echo -)"
cat {file}"""
LEAVE = """mkdir -p {folder} && cd {folder} || exit
cat > {part} && rm -f stop || exit
[ -z {stale} ] || ! grep -qsF -- {stale} {file} || rm -f {file}
# where files can't have two names, the second way
ln {part} {file} 2> /dev/null || (set -C && cat {part} > {file}) 2> /dev/null
rm -f {part}
"""


def leave(shared: str, run: str, intent: Intent, stale: str) -> str:
    """Leaves the intent that stdin has, in the place of the one with the token `stale`, and says
    what is there then.
    """
    words = {
        "folder": shlex.quote(f"runs/{run}"),
        "file": INTENT.name,
        "part": f".{INTENT.name}.{intent.token}",
    }
    return (
        f"cd -- {shlex.quote(shared)} || exit\n"
        + LEAVE.format(stale=shlex.quote(stale), **words)
        + READ.format(file=INTENT.name)
    )


def look(shared: str, run: str, touch: bool) -> str:
    """Says what is there; nothing where none is. `touch`: and that it goes on."""
    enter = f"cd -- {shlex.quote(f'{shared}/runs/{run}')} 2> /dev/null || exit 0\n"
    return (
        enter
        + (f"[ ! -e {INTENT.name} ] || touch -c {INTENT.name}\n" if touch else "")
        + READ.format(file=INTENT.name)
    )


def withdraw(shared: str, run: str, intent: Intent, begun: bool) -> str:
    """Removes the intent with this token, and an empty folder; unless the run has `begun`, the
    request to stop too.
    """
    mine, files = (
        f"grep -qsF -- {shlex.quote(intent.token)} {INTENT.name}",
        INTENT.name + ("" if begun else " stop"),
    )
    folder = shlex.quote(f"{shared}/runs/{run}")
    return (
        f"cd -- {folder} 2> /dev/null || exit 0\n! {mine} || rm -f {files}\nrmdir -- {folder} "
        "2> /dev/null || true"
    )


def read_found(text: str) -> DeclaredIntent | None:
    """What these commands said; Implausible where it is something else."""
    line, _, written = text.partition("\n")
    if not line:
        return None
    match, intent = re.fullmatch(r"(-?[0-9]{1,12}) (asked|-)", line), parse(written)
    if match is None:
        raise Implausible(f"the line {line[:80]!a}")
    return DeclaredIntent(intent, float(match[1]), match[2] == "asked") if intent else None
