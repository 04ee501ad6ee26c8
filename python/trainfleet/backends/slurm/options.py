"""The options of sbatch that are this program's to set: fleet.slurm.options gives others, and is
refused these.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...config import Config

OURS = {  # option → the key that says it, or "" where a job needs it as it is
    "job-name": "name",
    "nodes": "fleet.nodes",
    "exclusive": "fleet.exclusive",
    "partition": "fleet.slurm.partition",
    "account": "fleet.slurm.account",
    "qos": "fleet.slurm.qos",
    "time": "fleet.slurm.time_limit",
    "constraint": "fleet.slurm.constraint",
    "reservation": "fleet.slurm.reservation",
    "gres": "fleet.slurm.gres",
    "signal": "fleet.slurm.notice",
    "requeue": "fleet.slurm.requeue",
    "no-requeue": "fleet.slurm.requeue",
    "container": "fleet.slurm.container",
    "container-id": "fleet.slurm.container",
    "chdir": "fleet.shared_folder",
    **dict.fromkeys(
        (
            "ntasks",
            "ntasks-per-node",
            "tasks-per-node",
            "exclude",
            "dependency",
            "kill-on-invalid-dep",
        ),
        "",
    ),
    **dict.fromkeys(
        (
            "output",
            "error",
            "input",
            "open-mode",
            "comment",
            "export",
            "export-file",
            "get-user-env",
        ),
        "",
    ),
    **dict.fromkeys(
        ("array", "wrap", "test-only", "wait", "parsable", "quiet", "help", "usage", "version"), ""
    ),
    **dict.fromkeys(("clusters", "no-kill", "uid", "gid", "ignore-pbs"), ""),
}
# all of a node's memory is a job's while fleet.exclusive is true
WHOLE_NODES = ("mem", "mem-per-cpu", "mem-per-gpu")


def taken(config: Config) -> dict[str, str]:
    """Returns OURS with what the config adds to it."""
    return OURS | (dict.fromkeys(WHOLE_NODES, "fleet.exclusive") if config.fleet.exclusive else {})


def refuse(config: Config) -> Iterator[tuple[str, str]]:
    """Options that are set here already. sbatch takes a beginning of an option for the whole
    (getopt_long), so that too.
    """
    ours = taken(config)
    for option in config.fleet.slurm.options:
        name = option.removeprefix("--").partition("=")[0]
        if known := next((other for other in sorted(ours) if other.startswith(name)), ""):
            says = f"{ours[known]} says that" if ours[known] else "leave it out"
            yield "fleet.slurm.options", f"{option}: the program sets --{known} itself; {says}"
