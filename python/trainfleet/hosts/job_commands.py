"""Shell commands that start, query and end a node's part of a job. Pure: the transport runs them.

The processes of a job are known by their environment (TRAINFLEET_JOB), which children inherit. So a
fence finds every process of a run on a node, regardless of its parent. The supervisor's file only
records the exit code.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from ..node.supervisor import told
from ..process.host_marker import ANNOUNCED
from ..trust.errors import BackendError
from .host_results import Implausible

JOBS = "~/.trainfleet/jobs"  # on the node; one folder per host name, as nodes may share homes
MARK = "TRAINFLEET_JOB"
LAUNCHER = "TRAINFLEET_LAUNCHER"  # the mark of a run's launcher and of its standby


def mark_of(folder: str, run: str) -> str:
    """Returns the mark of a run's processes, unique on any fleet; BackendError unless the names
    form a line of visible letters.
    """
    return _require_mark(f"{folder}:{run}")


def _require_mark(mark: str) -> str:
    """Returns the mark if it can belong to only one run. grep takes each line as a pattern, and an
    empty one matches every process.
    """
    folder, _, run = mark.rpartition(":")
    if not mark.isprintable() or not folder.strip() or not run.strip():
        raise BackendError(
            f"{mark!a} marks no run", next="check fleet.shared_folder and name in its config"
        )
    return mark


def task(script: str, environment: Mapping[str, str], token: str) -> str:
    """Returns the supervisor's stdin. No value of it shows in a process list."""
    return json.dumps({"script": script, "environment": dict(environment), "token": token})


def start(name: str, mark: str, python: str, code: str, folder: str, kind: str = MARK) -> str:
    """Returns the command that starts the order on stdin under the file `name`, in `folder`. It
    ends at once, with 0 only if the order runs.
    """
    settings = [f"{kind}={mark}", f"PYTHONPATH={code}/python", "PYTHONSAFEPATH=1"]
    return (
        f'{_file(name)}; mkdir -p "${{f%/*}}" && cd {shlex.quote(folder)} && '
        f"exec env {shlex.join(settings)} {shlex.quote(python)} -m trainfleet.node.supervisor "
        '--detach "$f"'
    )


def look(name: str, token: str = "") -> str:
    """Returns the command that prints `running`, `ended CODE`, `failed WORDS` (it never began),
    `rebooted` or `absent`, also for another token.
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
    """Returns the command that prints `running` if the node has any process of the run, whoever
    started it, and else `absent`.
    """
    return f"grep -Fqsxz -e {_word(MARK, mark)} /proc/[0-9]*/environ && echo running || echo absent"


@dataclass(frozen=True)
class PartState:
    """The state of a node's part (running, ended, rebooted or absent), its exit code, and its words
    outside its log.
    """

    state: str
    code: int = 0
    words: str = ""


RUNNING = PartState("running")


def read_look(text: str) -> PartState:
    """Parses the output of `look`; Implausible if it is anything else."""
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
    raise Implausible(f"the words {said[:60]!a}")


def _printable(words: str) -> str:
    return "".join(letter for letter in words if letter.isprintable())


def terminate(name: str) -> str:
    """Returns the command that sends SIGTERM to the supervisor, which passes it on."""
    return f'{_file(name)}; [ -s "$f.exit" ] || {{ read -r pid _ < "$f" && kill -TERM "$pid"; }}'


def fence(mark: str, launchers: bool = False) -> str:
    """Returns the command that kills every process of a run, and succeeds only when no process is
    left. A zombie has no environment and counts as gone.

    `launchers` also kills the run's launchers, which would start it again.

    Raises:
        BackendError: the mark could belong to more than this run.
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
echo "still there: $pids" >&2; exit 1"""


def _word(kind: str, mark: str) -> str:
    """Returns the entry in the environment of such a process, quoted for a shell."""
    return shlex.quote(f"{kind}={_require_mark(mark)}")


def marks() -> str:
    """Returns the command that prints the runs that have processes on the node: lines `mine MARK`,
    `user NAME`, and `said WORDS` (supervisor.announce).

    The environment of another user's processes can't be read, so these announce their run in a
    socket's name.
    """
    return (
        f"cat /proc/[0-9]*/environ 2> /dev/null | tr '\\0' '\\n' | sed -n 's/^{MARK}=/mine /p' | "
        f"sort -u; echo \"user $(id -un)\"; sed -n 's/.* @{ANNOUNCED}/said /p' /proc/net/unix"
    )


def read_marks(text: str, mark: str) -> set[str]:
    """Returns the marks of other runs than `mark` on a node, with their users' names, from the
    output of `marks`.
    """
    kinds = [line.partition(" ") for line in text.split("\n")]
    user = next((rest for kind, _, rest in kinds if kind == "user"), "")
    found = {rest for kind, _, rest in kinds if kind == "mine" and rest != mark}
    for kind, _, rest in kinds:
        _, _, words = rest.partition(":")
        # the socket's name may have been too short for the full mark
        whose, _, what = words.partition(":")
        if kind == "said" and not (
            whose == user and any(known.startswith(what) for known in (mark, *found))
        ):
            found.add(f"{what} (of {whose})")
    return found


def _file(name: str) -> str:
    return f"f={JOBS}/$(uname -n)/{shlex.quote(name)}"
