"""Shell commands that measure and remove a run's folders in a fleet's shared folder, for one host.
Pure.

Only `runs/<name>` and `data/<name>` are ever named, and a host removes one only where its real path
is what its name says: a link in the way is named and left, with what it leads to. Of a dataset's
folder only what the program wrote goes (run/contents.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from ..run import contents
from ..trust.errors import BackendError
from .host_results import Implausible

FOLDER = r"(runs|data)/[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
ENTER = "cd -P -- {shared} || exit 0; top=$(pwd -P)"
MOST = 200  # files of others that a purge names
# Files that match, links that match, and the folders that are empty then; what is left is named.
OURS = """find {folder} -xdev -regextype posix-extended -type f -regex {files} -delete
find {folder} -xdev -regextype posix-extended -type l -regex {links} -delete
find {folder} -xdev -depth -type d -empty -delete
[ ! -d {folder} ] || find {folder} -xdev ! -type d | head -n {most}"""


def measure(shared: str, folders: Iterable[str]) -> str:
    """Prints `bytes<tab>folder` for each of the folders that are there; nothing where the shared
    folder is not.
    """
    names = _checked(shared, folders)
    return f"{ENTER.format(shared=shlex.quote(shared))}\n" + (
        f'for folder in {names}; do [ ! -d "$folder" ] || [ -L "$folder" ] || du -sb -- '
        '"$folder" || exit; done'
    )


def remove(shared: str, folders: Iterable[str]) -> str:
    """Removes the folders, and names what it leaves in a dataset's: files of others.

    Ends badly, before anything is removed, when one of the folders is a link or lies behind one.
    """
    folders = list(folders)
    names = _checked(shared, folders)
    steps = [
        _only_ours(folder)
        if folder.startswith("data/")
        else f"rm -rf --one-file-system -- {shlex.quote(folder)}"
        for folder in folders
    ]
    return f"""{ENTER.format(shared=shlex.quote(shared))}
for folder in {names}; do
[ ! -e "$folder" ] && [ ! -L "$folder" ] && continue
[ "$(realpath -- "$folder")" = "${{top%/}}/$folder" ] || {{ echo "$top/$folder is a link, or lies behind one" >&2; exit 1; }}
done
""" + "\n".join(steps)  # noqa: E501


def _only_ours(folder: str) -> str:
    """Removes a dataset's files from its folder, and the folder where nothing else is in it."""
    files, links = contents.pattern_of(contents.DATASET), contents.RANK_LOGS_LINK.pattern
    within = folder.replace(".", "[.]")
    words = {
        name: shlex.quote(f"{within}/({pattern})")
        for name, pattern in (("files", files), ("links", links))
    }
    return (
        f"[ ! -d {shlex.quote(folder)} ] || {{ "
        f"{OURS.format(folder=shlex.quote(folder), most=MOST, **words)}; }}"
    )


def read_left(text: str, folders: Iterable[str]) -> list[str]:
    """The files that `remove` has left in these folders; Implausible for one elsewhere, or more
    than it names.
    """
    found, inside = list(filter(None, text.split("\n"))), tuple(f"{folder}/" for folder in folders)
    strange = [
        path
        for path in found
        if not path.startswith(inside) or not path.isprintable() or len(path) > 4096
    ]
    if strange or len(found) > MOST * len(inside):
        raise Implausible(f"the line {(strange or found)[0][:80]!a}")
    return found


def read_measures(text: str, folders: Iterable[str]) -> dict[str, int]:
    """Folder → bytes, of what `measure` printed for these folders; Implausible for another folder,
    or what is no number.
    """
    asked, found = set(folders), {}
    for line in filter(None, text.split("\n")):
        count, _, folder = line.partition("\t")
        if folder not in asked or not re.fullmatch(r"[0-9]{1,20}", count):
            raise Implausible(f"the line {line[:80]!a}")
        found[folder] = int(count)
    return found


def _checked(shared: str, folders: Iterable[str]) -> str:
    """The folders' names as a shell takes them.

    Raises:
        BackendError: one is no run's and no dataset's, or the shared folder is none.
    """
    names = list(folders)
    if strange := [name for name in names if not re.fullmatch(FOLDER, name)]:
        what = f"{strange[0]!a} is not the folder of a run or a dataset"
        raise BackendError(what, next="look at name and data.name in its config")
    if not shared.startswith("/") or shared.strip("/") == "" or not shared.isprintable():
        raise BackendError(
            f"{shared!a} is no folder that a fleet can share", next="look at fleet.shared_folder"
        )
    return shlex.join(names)
