"""Builds shell commands to start, query and stop a node's part of a job, and to manage its folders.

The transport runs the commands. Child processes inherit the environment variable TRAINFLEET_JOB,
which identifies a job's processes. A fence can therefore find all of a run's processes on a node,
whatever started them. The supervisor's file is only needed for the exit code.

Folder commands accept only `runs/<name>` and `data/<name>`, and fail if a folder is a symbolic link
or is below one. In a dataset folder, they delete only files that trainfleet wrote
(run/contents.py).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..node.supervisor import told
from ..process.processes import ANNOUNCED
from ..run import contents
from ..trust.errors import BackendError
from .host_results import Implausible

FOLDER = r"(runs|data)/[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
ENTER = "cd -P -- {shared} || exit 0; top=$(pwd -P)"
MOST = 200  # maximum number of remaining files that a purge lists
# Deletes matching files, matching links and empty folders, and lists the remaining files.
OURS = """find {folder} -xdev -regextype posix-extended -type f -regex {files} -delete
find {folder} -xdev -regextype posix-extended -type l -regex {links} -delete
find {folder} -xdev -depth -type d -empty -delete
[ ! -d {folder} ] || find {folder} -xdev ! -type d | head -n {most}"""


def measure(shared: str, folders: Iterable[str]) -> str:
    """Returns a command that prints `bytes<tab>folder` for each existing folder.

    Prints nothing if the shared folder does not exist.
    """
    names = _checked(shared, folders)
    return f"{ENTER.format(shared=shlex.quote(shared))}\n" + (
        f'for folder in {names}; do [ ! -d "$folder" ] || [ -L "$folder" ] || du -sb -- '
        '"$folder" || exit; done'
    )


def remove(shared: str, folders: Iterable[str]) -> str:
    """Returns a command that deletes the folders, and lists the files that it keeps in dataset
    folders.

    If a folder is a symbolic link or is below one, the command fails without deleting anything.
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
[ "$(realpath -- "$folder")" = "${{top%/}}/$folder" ] || {{ echo "$top/$folder is a symbolic link or is below one" >&2; exit 1; }}
done
""" + "\n".join(steps)  # noqa: E501


def _only_ours(folder: str) -> str:
    """Returns a command that deletes a dataset's files, and its folder if nothing else remains."""
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
    """Parses the list of files that `remove` kept in `folders`.

    Raises Implausible if a file is outside the folders, or if there are more than MOST files per
    folder.
    """
    found, inside = list(filter(None, text.split("\n"))), tuple(f"{folder}/" for folder in folders)
    strange = [
        path
        for path in found
        if not path.startswith(inside) or not path.isprintable() or len(path) > 4096
    ]
    if strange or len(found) > MOST * len(inside):
        raise Implausible(f"unexpected line {(strange or found)[0][:80]!a}")
    return found


def read_measures(text: str, folders: Iterable[str]) -> dict[str, int]:
    """Parses the output of `measure` into folder → bytes.

    Raises Implausible for an unknown folder or a malformed size.
    """
    asked, found = set(folders), {}
    for line in filter(None, text.split("\n")):
        count, _, folder = line.partition("\t")
        if folder not in asked or not re.fullmatch(r"[0-9]{1,20}", count):
            raise Implausible(f"unexpected line {line[:80]!a}")
        found[folder] = int(count)
    return found


def _checked(shared: str, folders: Iterable[str]) -> str:
    """Returns the validated folder names, quoted for a shell.

    Raises:
        BackendError: a name is not a run or dataset folder, or the shared folder is invalid.
    """
    names = list(folders)
    if strange := [name for name in names if not re.fullmatch(FOLDER, name)]:
        raise BackendError(
            f"{strange[0]!a} is not a folder of a run or dataset",
            next="check name and data.name in its config",
        )
    if not shared.startswith("/") or shared.strip("/") == "" or not shared.isprintable():
        raise BackendError(
            f"{shared!a} is not a valid shared folder", next="check fleet.shared_folder"
        )
    return shlex.join(names)


# folder on the node; has a subfolder per hostname, because nodes may share home directories
JOBS = "~/.trainfleet/jobs"
MARK = "TRAINFLEET_JOB"
# environment variable that contains the mark of a launcher or standby
LAUNCHER = "TRAINFLEET_LAUNCHER"


def mark_of(folder: str, run: str) -> str:
    """Returns the mark that identifies a run's processes.

    Raises BackendError if the folder or name is blank or contains unprintable characters.
    """
    return _require_mark(f"{folder}:{run}")


def _require_mark(mark: str) -> str:
    """Returns the mark if it identifies exactly one run. Raises BackendError otherwise.

    grep treats each line as a separate pattern, and an empty pattern would match every process.
    """
    folder, _, run = mark.rpartition(":")
    if not mark.isprintable() or not folder.strip() or not run.strip():
        raise BackendError(
            f"{mark!a} does not identify a run",
            next="check fleet.shared_folder and name in its config",
        )
    return mark


def task(script: str, environment: Mapping[str, str], token: str) -> str:
    """Returns the supervisor's stdin.

    It includes the secrets, because a command line would expose them in the process list.
    """
    return json.dumps({"script": script, "environment": dict(environment), "token": token})


def start(name: str, mark: str, python: str, code: str, folder: str, kind: str = MARK) -> str:
    """Returns a command that starts the task read from stdin in `folder`, and records it as `name`.

    The command does not wait for the task. Its exit code is 0 only if the task was started.
    """
    settings = [f"{kind}={mark}", f"PYTHONPATH={code}/python", "PYTHONSAFEPATH=1"]
    return (
        f'{_file(name)}; mkdir -p "${{f%/*}}" && cd {shlex.quote(folder)} && '
        f"exec env {shlex.join(settings)} {shlex.quote(python)} -m trainfleet.node.supervisor "
        '--detach "$f"'
    )


def look(name: str, token: str = "") -> str:
    """Returns a command that prints the state of a task.

    The state is `running`, `ended CODE`, `failed WORDS` (it never started), `rebooted` or `absent`.
    A task with a different token counts as `absent`.
    """
    return f"""{_file(name)}; mine={shlex.quote(token)}
[ -s "$f" ] && read -r pid start boot token < "$f" || {{ echo absent; exit; }}
[ -z "$mine" ] || [ "$mine" = "$token" ] || {{ echo absent; exit; }}
said() {{ tail -n 4 "$f.said" 2> /dev/null | tr '\\n' ' '; }}
over() {{ [ -s "$f.exit" ] && w=$(said) && echo "ended $(cat "$f.exit")${{w:+: $w}}"; }}
over && exit
[ "$boot" = "$(cat /proc/sys/kernel/random/boot_id)" ] || {{ echo rebooted; exit; }}
[ "$(sed 's/.*) //' "/proc/$pid/stat" 2> /dev/null | cut -d ' ' -f 20)" = "$start" ] && echo running && exit
over && exit
[ -s "$f.said" ] && echo "failed $(tail -n 1 "$f.said" | cut -c 1-300)" || echo 'ended 137'"""  # noqa: E501


def look_for(mark: str) -> str:
    """Returns a command that prints `running` if any of the run's processes exist on the node.

    Otherwise, prints `absent`.
    """
    return f"grep -Fqsxz -e {_word(MARK, mark)} /proc/[0-9]*/environ && echo running || echo absent"


@dataclass(frozen=True)
class PartState:
    """State of a node's part of a job.

    `state` is running, ended, rebooted or absent. `words` is the output that is not in the log.
    """

    state: str
    code: int = 0
    words: str = ""


RUNNING = PartState("running")


def read_look(text: str) -> PartState:
    """Parses the output of the `look` command. Raises Implausible if it is malformed."""
    said = text.strip().rpartition("\n")[2]
    if said in ("running", "rebooted"):
        return PartState(said)
    if said == "absent":
        return PartState(said, 137)
    if match := re.fullmatch(r"ended ([0-9]{1,3})(?:: (.+))?", said):
        return PartState(
            "ended", int(match[1]), _printable(told(match[2] or "")) if match[1] != "0" else ""
        )
    if match := re.fullmatch(r"failed (.+)", said):
        return PartState("ended", 127, f"its script failed: {_printable(match[1])[:200]}")
    raise Implausible(f"unknown state {said[:60]!a}")


def _printable(words: str) -> str:
    return "".join(letter for letter in words if letter.isprintable())


def terminate(name: str) -> str:
    """Returns a command that sends SIGTERM to the supervisor, which forwards it to the task."""
    return f'{_file(name)}; [ -s "$f.exit" ] || {{ read -r pid _ < "$f" && kill -TERM "$pid"; }}'


def fence(mark: str, launchers: bool = False) -> str:
    """Returns a command that kills all of a run's processes, and fails if any survive.

    Zombies have no environment, so they count as gone. With `launchers`, also kills the run's
    launchers, which would otherwise restart the run.

    Raises:
        BackendError: the mark could match other runs' processes.
    """
    words = " ".join(
        f"-e {_word(kind, mark)}" for kind in ((LAUNCHER, MARK) if launchers else (MARK,))
    )
    return f"""for _ in $(seq 100); do
pids=$(grep -FsxzlZ {words} /proc/[0-9]*/environ | tr '\\0' '\\n' | cut -d / -f 3)
[ -n "$pids" ] || exit 0
kill -KILL $pids 2> /dev/null
sleep 0.1
done
echo "processes are still running: $pids" >&2; exit 1"""


def _word(kind: str, mark: str) -> str:
    """Returns the environment entry that marks a run's processes, quoted for a shell."""
    return shlex.quote(f"{kind}={_require_mark(mark)}")


def marks() -> str:
    """Returns a command that lists the runs with processes on the node.

    Prints lines of the form `mine MARK`, `user NAME` and `said WORDS` (supervisor.announce). The
    environment of other users' processes is unreadable, so each run also announces itself through a
    socket name.
    """
    return (
        f"cat /proc/[0-9]*/environ 2> /dev/null | tr '\\0' '\\n' | sed -n 's/^{MARK}=/mine /p' | "
        f"sort -u; echo \"user $(id -un)\"; sed -n 's/.* @{ANNOUNCED}/said /p' /proc/net/unix"
    )


def read_marks(text: str, mark: str) -> set[str]:
    """Parses the output of `marks` and returns the marks of all runs other than `mark`.

    The mark of another user's run includes the user's name.
    """
    kinds = [line.partition(" ") for line in text.split("\n")]
    user = next((rest for kind, _, rest in kinds if kind == "user"), "")
    found = {rest for kind, _, rest in kinds if kind == "mine" and rest != mark}
    for kind, _, rest in kinds:
        _, _, words = rest.partition(":")
        # Socket names have a limited length, so the mark may be truncated.
        whose, _, what = words.partition(":")
        if kind == "said" and not (
            whose == user and any(known.startswith(what) for known in (mark, *found))
        ):
            found.add(f"{what} (of {whose})")
    return found


def _file(name: str) -> str:
    return f"f={JOBS}/$(uname -n)/{shlex.quote(name)}"
