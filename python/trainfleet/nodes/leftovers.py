"""What setup and runs leave on hosts beside runs and datasets: make clean PURGE=1 lists it, PURGE=all removes it. Pure.

Drivers, EFA, Lustre and packages are neither listed nor removed: other programs may use them by now.
"""

from __future__ import annotations

import re
import shlex

from ..run import contents
from .head import KEY
from .host_results import Implausible
from .install_steps import HARDENING, LIMITS

IN_SHARED = tuple(kind.name.rstrip("/") for kind in contents.kinds(contents.SHARED))
HOME = "~/.trainfleet"
KEYS = "~/.ssh/authorized_keys"
OURS = " trainfleet head "  # in the comment of a head's key
WORDS = {
    "shared": "{what} in the shared folder",
    "key": f"{KEY}, a head's key",
    "admitted": f"{{what}} heads' keys in {KEYS}",
    "home": f"{HOME}, scripts and logs of jobs",
    "file": "{what}",
}


def find(shared: str = "") -> str:
    """Prints a line for each: its kind, and what it is. `shared`: checked by one host for all."""
    names = " ".join(IN_SHARED)
    look = f"""cd {shlex.quote(shared)} 2> /dev/null && for name in {names}; do
[ ! -d "$name" ] || [ -L "$name" ] || echo "shared $(du -sh -- "$name" | cut -f 1) $name"
done
"""
    return f"""{look if shared else ""}[ ! -e {KEY} ] || echo key
count=$(grep -cs -e '{OURS}' {KEYS})
[ "${{count:-0}}" = 0 ] || echo "admitted $count"
[ ! -d {HOME} ] || echo home
for path in {HARDENING} {LIMITS}; do [ ! -e "$path" ] || echo "file $path"; done"""


def read(text: str) -> list[str]:
    """What `find` printed, in words; Implausible where it printed something else."""
    found = []
    for line in filter(None, text.split("\n")):
        kind, _, what = line.partition(" ")
        if kind not in WORDS or not re.fullmatch(r"[A-Za-z0-9 ./_-]{0,80}", what):
            raise Implausible(f"the line {line[:80]!a}")
        found.append(WORDS[kind].format(what=what))
    return found


def remove(shared: str, is_root: bool) -> str:
    """Removes all of it. The key that came in by this connection is the user's own, and stays."""
    sudo = "" if is_root else "sudo -n "
    return f"""cd {shlex.quote(shared)} 2> /dev/null && rm -rf --one-file-system -- {" ".join(IN_SHARED)}
rm -rf -- {KEY} {KEY}.pub {HOME}
[ ! -e {KEYS} ] || sed -i -e '/{OURS}/d' {KEYS}
[ ! -e {HARDENING} ] || {sudo}rm -f -- {HARDENING}
[ ! -e {LIMITS} ] || {sudo}rm -f -- {LIMITS}"""
