"""Shell commands that leave, read and remove the intent of a launch in a fleet's shared folder, for
one host. Pure.

Their output, which `read_found` parses, is a line with the file's time and whether a stop was
requested, then the file.
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
    """Returns the command that writes the intent on stdin, in place of the one with the token
    `stale`, and prints the intent that is there then.
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
    """Returns the command that prints the intent; nothing if there is no intent. `touch` also
    renews its time.
    """
    enter = f"cd -- {shlex.quote(f'{shared}/runs/{run}')} 2> /dev/null || exit 0\n"
    return (
        enter
        + (f"[ ! -e {INTENT.name} ] || touch -c {INTENT.name}\n" if touch else "")
        + READ.format(file=INTENT.name)
    )


def withdraw(shared: str, run: str, intent: Intent, begun: bool) -> str:
    """Returns the command that removes the intent with this token, and an empty folder. Unless the
    run has `begun`, it also removes the stop request.
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
    """Parses the output of these commands; Implausible if it is anything else."""
    line, _, written = text.partition("\n")
    if not line:
        return None
    match, intent = re.fullmatch(r"(-?[0-9]{1,12}) (asked|-)", line), parse(written)
    if match is None:
        raise Implausible(f"the line {line[:80]!a}")
    return DeclaredIntent(intent, float(match[1]), match[2] == "asked") if intent else None
