"""Shell commands that measure and remove a run's folders in a fleet's shared folder, for one host.
Pure.

They name only `runs/<name>` and `data/<name>`, and remove a folder only if its real path matches
its name: a link in its place is reported and left, with its target. In a dataset's folder they
remove only files that the program wrote (run/contents.py).
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
MOST = 200  # other files that a purge names
# Removes matching files, matching links, and the folders that are then empty; prints the rest.
OURS = """find {folder} -xdev -regextype posix-extended -type f -regex {files} -delete
find {folder} -xdev -regextype posix-extended -type l -regex {links} -delete
find {folder} -xdev -depth -type d -empty -delete
[ ! -d {folder} ] || find {folder} -xdev ! -type d | head -n {most}"""


def measure(shared: str, folders: Iterable[str]) -> str:
    """Returns the command that prints `bytes<tab>folder` for each existing folder; nothing if the
    shared folder is missing.
    """
    names = _checked(shared, folders)
    return f"{ENTER.format(shared=shlex.quote(shared))}\n" + (
        f'for folder in {names}; do [ ! -d "$folder" ] || [ -L "$folder" ] || du -sb -- '
        '"$folder" || exit; done'
    )


def remove(shared: str, folders: Iterable[str]) -> str:
    """Returns the command that removes the folders, and prints other files that it leaves in a
    dataset's folder.

    It fails before it removes anything if one of the folders is a link or is behind one.
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
    """Returns the command that removes a dataset's files from its folder, and the folder if it is
    then empty.
    """
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
    """Returns the files that `remove` has left in these folders; Implausible for a file elsewhere,
    or more than MOST.
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
    """Parses the output of `measure` for these folders into folder → bytes; Implausible for another
    folder, or if a size is not a number.
    """
    asked, found = set(folders), {}
    for line in filter(None, text.split("\n")):
        count, _, folder = line.partition("\t")
        if folder not in asked or not re.fullmatch(r"[0-9]{1,20}", count):
            raise Implausible(f"the line {line[:80]!a}")
        found[folder] = int(count)
    return found


def _checked(shared: str, folders: Iterable[str]) -> str:
    """Returns the folders' names, quoted for a shell.

    Raises:
        BackendError: a name is not that of a run or a dataset, or the shared folder is not valid.
    """
    names = list(folders)
    if strange := [name for name in names if not re.fullmatch(FOLDER, name)]:
        what = f"{strange[0]!a} is not the folder of a run or a dataset"
        raise BackendError(what, next="check name and data.name in its config")
    if not shared.startswith("/") or shared.strip("/") == "" or not shared.isprintable():
        raise BackendError(
            f"{shared!a} is not a folder that a fleet can share", next="check fleet.shared_folder"
        )
    return shlex.join(names)
