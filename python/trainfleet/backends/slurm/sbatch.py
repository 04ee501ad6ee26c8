"""Builds the sbatch batch script: the resources that a job requests, and its nodes' commands. Pure.

Slurm runs the script on the first node of each allocation, and again after a requeue. The script
ensures that each token starts only one job, and uses srun to start trainfleet.node.entrypoint on
every node. Before the time limit, ranks save and exit, and the script requeues the job. Without a
launcher, launch/aftermath.py decides whether to restart after a failure. Sources:
slurm.schedmd.com, sbatch.html (INPUT and OUTPUT ENVIRONMENT VARIABLES) and srun.html (--signal,
--requeue, --export).

A site may set sbatch options through variables such as SBATCH_ACCOUNT, which would override the
script. They are read once, when a job is planned, and Slurm commands run without them (client.py).
The script contains the resulting options, so a plan shows them, and they apply to every start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from ...config import Config, Refusals
from ...config.tables import read_table
from ...hosts import preflight
from ...hosts.fleet import wanted_of
from ...node.placement import Placement, torchrun
from ...node.placements import SLURM as PLACEMENT
from ...node.precompile import ahead
from ...node.supervisor import EXIT, WATCH
from ...plan.fabric_environment import NCCL_LOGS
from ...plan.job import WIDTH, Artifact, Job, fold
from ...run import contents, run_folder
from ...trust import untrusted_input
from ...trust.errors import BackendError
from ..node_script import entrypoint_words
from .client import SlurmClient

NAME = "job.sbatch"
TOKEN = "TRAINFLEET_TOKEN"
LONGEST_NAME = 128  # maximum characters per job name; accounting truncates longer ones
# A token's claim file contains the job ID. If a job finds another job's ID in it, it exits. The
# script removes stop requests that node/supervisor.py or an earlier start of this script left
# behind. Signals interrupt `wait`, so the script waits in a loop until the child has exited, and
# uses only the last exit code.
BODY = """mine={start} stop={folder}/stop near=
mkdir -p "$mine" {folder}/logs || exit
claim={claim}
(set -C && echo "$SLURM_JOB_ID" > "$claim") 2> /dev/null
[ "$(cat "$claim")" = "$SLURM_JOB_ID" ] || {{ echo "job $(cat "$claim") already runs this request"; exit 0; }}
grep -qs ^{engine} "$stop" && rm -f "$stop"
wc -c {folder}/logs/*.log > "$mine/logs" 2> /dev/null
trap 'near=1; {notice}' USR1
{step}
child=$!
wait "$child"
code=$?
while kill -0 "$child" 2> /dev/null; do
  wait "$child"
  code=$?
done
"""  # noqa: E501
AGAIN = """[ "$code$near" = 0 ] || {judge} || exit "$code"
[ "$code$near" = 0 ] || {{ scontrol requeue "$SLURM_JOB_ID" && sleep 60; }} # Slurm ends this script
"""
# Writes a stop request, which ranks check at each step. The file appears in one step, because an
# empty one is a user's request.
ASK = 'echo "{engine} the time limit is near" > "$mine/stop"; mv -n "$mine/stop" "$stop"'
TERMINATE = 'scancel --signal=TERM "$SLURM_JOB_ID"'  # sends SIGTERM to the nodes' entrypoints
ADMISSION = "trainfleet.launch.admission"
# preflight command on each node, which writes the node's facts to a file
LOOK = '"$@" > "$0/facts-$SLURM_NODEID"'
# Command that starts a node and sets the path of its exit code file. The first node also monitors
# all ranks whenever there is no launcher.
NODE = (
    '{exit}="$0/node-$SLURM_NODEID.exit"; export {exit}; [ "$SLURM_NODEID" != 0 ] || export '
    '{watch}={ranks}; exec "$@"'
)


@dataclass(frozen=True)
class Ground:
    """Environment of a job: shared folder and Python interpreter as the nodes see them, and
    excluded nodes.
    """

    folder: str
    python: str
    without: tuple[str, ...] = ()


def script(
    config: Config,
    job: Job,
    ground: Ground,
    environment: Mapping[str, str],
    notes: Iterable[str] = (),
) -> Artifact:
    """Returns job.sbatch, with `notes` as comments at the top."""
    words = ["-m", *entrypoint_words(job, PLACEMENT)]
    settings = [f"export {name}={quote(value)}" for name, value in sorted(environment.items())]
    lines = [
        "#!/bin/sh",
        *(f"#SBATCH {option}" for option in options(config, job, ground)),
        *(f"# {line}" for line in (*_heading(job, ground), *notes)),
        f"cd {quote(ground.folder)} || exit",
        *settings,
        *_threads(job),
        *_body(config, job, ground, words),
    ]
    return Artifact(NAME, "\n".join(lines) + "\n")


def options(config: Config, job: Job, ground: Ground) -> Iterator[str]:
    """Yields the requested resources as sbatch options."""
    fleet, slurm = config.fleet, config.fleet.slurm
    yield from (
        f"--job-name={job.name[:LONGEST_NAME]}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
    )
    yield from ("--exclusive", "--mem=0") if fleet.exclusive else ()
    for name, value in (
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("time", slurm.time_limit_minutes),
        ("constraint", slurm.constraint),
        ("reservation", slurm.reservation),
        ("gres", slurm.gres),
        ("exclude", ",".join(ground.without)),
    ):
        if value:
            yield f"--{name}={value}"
    if job.after:  # Slurm cancels this job if the other one fails
        yield from (
            f"--dependency=afterok:{job.after.rpartition(':')[2]}",
            "--kill-on-invalid-dep=yes",
        )
    yield from (
        f"--signal=B:USR1@{slurm.warn_before_seconds}",
        "--requeue" if slurm.requeue else "--no-requeue",
    )
    yield from (
        f"--chdir={ground.folder}",
        f"--output={run_folder.job_log(job.folder)}",
        "--open-mode=append",
    )
    yield from slurm.options


def _heading(job: Job, ground: Ground) -> Iterator[str]:
    yield (
        f"{job.kind} {job.name}: {job.nodes} nodes; the output of each goes to "
        f"{job.folder}/logs/node-<i>.log"
    )
    if job.torchrun:
        placement = Placement(0, job.nodes, "$FIRST_HOST", job.port or 0)
        words = torchrun(placement, job.ranks_per_node, job.module, ground.python)
        line = " ".join([*(ahead(ground.python, words) if job.ahead else words), *job.arguments])
        yield "node 0 runs, with Slurm's values: " + " ".join(line.split())


def _threads(job: Job) -> Iterator[str]:
    """Yields the line that derives the thread or worker count from Slurm's CPU count per node."""
    if job.torchrun:
        share = f"SLURM_CPUS_ON_NODE / {job.ranks_per_node}"
        yield f"export OMP_NUM_THREADS=$(({share} > 0 ? {share} : 1))"
    else:
        yield 'export WORKERS="$SLURM_CPUS_ON_NODE"'


def _body(config: Config, job: Job, ground: Ground, words: Iterable[str]) -> Iterator[str]:
    watched = job.nodes * job.ranks_per_node if job.beats else 0
    node = ["sh", "-c", quote(NODE.format(exit=EXIT, watch=WATCH, ranks=watched)), '"$mine"']
    own = [*node, *map(quote, [ground.python, *words])]
    step = fold([*_srun(config, job, ground, job.nodes), *own], WIDTH)
    folder = quote(str(job.folder))
    yield BODY.format(
        folder=folder,
        start=contents.START.at(folder, job="$SLURM_JOB_ID", start="${SLURM_RESTART_COUNT:-0}"),
        claim=contents.CLAIM.at(folder, token=f"${{{TOKEN}:-by-hand-$SLURM_JOB_ID}}"),
        engine=run_folder.ENGINE,
        notice=ASK.format(engine=run_folder.ENGINE) if job.beats else TERMINATE,
        step="\n".join(_with_preflight(config, job, ground, step)),
    ).rstrip()
    if config.fleet.slurm.requeue:
        yield _requeue(config, job, ground)
    yield 'exit "$code"'


def _requeue(config: Config, job: Job, ground: Ground) -> str:
    """Returns the lines that requeue the job if a retry or the time limit requires it."""
    judge = [ground.python, "-m", "trainfleet.launch.aftermath", str(job.folder)]
    words = [*_srun(config, job, ground, 1), *map(quote, judge), '"$mine" "$near"']
    return AGAIN.format(judge=" ".join(words)).rstrip()


def _with_preflight(
    config: Config, job: Job, ground: Ground, start: Iterable[str]
) -> Iterator[str]:
    """Yields the script lines that run `start` in the background.

    With fleet.slurm.preflight and several nodes, `start` runs only once the nodes have passed the
    preflight.
    """
    if not (config.fleet.slurm.preflight and job.torchrun and job.nodes > 1):
        *lines, last = start
        yield from [*lines, f"{last} &"]
        return
    everywhere, admission = _srun(config, job, ground, job.nodes), [ground.python, "-m", ADMISSION]
    speed = [
        *everywhere,
        "env",
        *(f"{name}={quote(value)}" for name, value in NCCL_LOGS.items()),
        quote(ground.python),
        *["-m", "trainfleet.node.entrypoint", "--on", "slurm", "--folder"],
        '"$mine/gate"',
        "--ranks",
        str(job.ranks_per_node),
        "--",
        *preflight.speed_words(wanted_of(config)),
    ]
    facts = [*everywhere, "sh", "-c", quote(LOOK), '"$mine"', *map(quote, admission)]
    yield "{ # the preflight first: each node's facts, and the bandwidth between nodes"
    yield from fold(facts, WIDTH)
    yield from fold(speed, WIDTH)
    yield from fold(
        [
            *_srun(config, job, ground, 1),
            *map(quote, [*admission, str(job.folder)]),
            '"$mine"',
            "&&",
        ],
        WIDTH,
    )
    yield from start
    yield "} &"


def _srun(config: Config, job: Job, ground: Ground, nodes: int) -> list[str]:
    """Returns the srun command prefix, which starts one task per node with all of the job's
    resources.

    --export=ALL passes sbatch's environment to the tasks. --cpu-bind=none prevents srun from
    binding each task to a single core.
    """
    own = [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--export=ALL",
        "--input=none",
        "--mpi=none",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
    ]
    return [*own, *_container(config, job, ground)] if job.image else own


def _container(config: Config, job: Job, ground: Ground) -> list[str]:
    """Returns the srun arguments that run a command in the job's image. The shared folder has the
    same path inside the container.

    github.com/NVIDIA/pyxis (--container-*), apptainer.org/docs/user/latest (exec).
    """
    folder, image = quote(ground.folder), quote(job.image)
    if config.fleet.slurm.container_runtime == "pyxis":
        return [
            f"--container-image={image}",
            f"--container-mounts={folder}:{folder}",
            f"--container-workdir={folder}",
            "--no-container-mount-home",
        ]
    devices = ["--nv"] if config.fleet.device == "cuda" else []
    return [
        "apptainer",
        "exec",
        *devices,
        "--bind",
        f"{folder}:{folder}",
        "--pwd",
        folder,
        f"docker://{image}",
    ]


OURS: dict[str, str] = read_table(Path(__file__).with_name("sbatch_options.yaml"))
# memory options; with fleet.exclusive, trainfleet sets them to give jobs all of a node's memory
WHOLE_NODES = ("mem", "mem-per-cpu", "mem-per-gpu")


def taken(config: Config) -> dict[str, str]:
    """Returns the sbatch options that trainfleet sets for this config."""
    return OURS | (dict.fromkeys(WHOLE_NODES, "fleet.exclusive") if config.fleet.exclusive else {})


def refuse(config: Config) -> Refusals:
    """Yields an error for each option that trainfleet also sets.

    This includes abbreviations, which sbatch accepts (getopt_long).
    """
    ours = taken(config)
    for option in config.fleet.slurm.options:
        name = option.removeprefix("--").partition("=")[0]
        if known := next((other for other in sorted(ours) if other.startswith(name)), ""):
            says = f"use {ours[known]}" if ours[known] else "remove it"
            yield "fleet.slurm.options", f"{option}: trainfleet sets --{known} itself; {says}"


SWITCHES, WAIT = "SBATCH_REQ_SWITCH", "SBATCH_WAIT4SWITCH"
NAMED = {  # environment variable → option, if their names differ
    "SBATCH_BURST_BUFFER": "bb",
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
    "SBATCH_MEM_PER_NODE": "mem",
    SWITCHES: "switches",
    "SBATCH_TIMELIMIT": "time",
    "SLURM_HINT": "hint",
}
# Options that a site may set. All other variables set one of trainfleet's options, or do not affect
# where and how a job runs.
KNOWN = re.compile(
    "account|acctg-freq|batch|bb|cluster-constraint|constraint|core-spec|cpu-freq|cpus-per-gpu|delay-boot|distribution|gpu-bind|"
    "gpu-freq|gpus|gpus-per-node|gpus-per-socket|gpus-per-task|gres|gres-flags|hint|mem|mem-bind|mem-per-cpu|mem-per-gpu|network|"
    "overcommit|partition|power|prefer|profile|qos|reservation|segment|spread-job|switches|thread-spec|threads-per-core|time|"
    "tres-bind|tres-per-task|use-min-nodes|wait-all-nodes|wckey"
)
FLAGS = ("overcommit", "spread-job", "use-min-nodes")


def with_site_options(config: Config, environment: Mapping[str, str]) -> tuple[Config, list[str]]:
    """Applies the site's sbatch variables to the config. Config keys take precedence.

    Returns the new config, and one note per variable that states the resulting option or why the
    variable is ignored.

    Raises:
        BackendError: a value can't be written to a batch script.
    """
    slurm, notes = config.fleet.slurm, list[str]()
    for variable, value in sorted(environment.items()):
        name = option_of(variable)
        if value in ("no", "0") if name in FLAGS else not value:
            continue
        if key := _who_says(config, name):
            notes.append(f"{variable} is ignored: {key} sets this option")
            continue
        if re.search(r"[^!-~]|[\\'\"#]", value):
            what = f"{untrusted_input.show(value)} can't be written to a batch script"
            then = f"unset {variable}"
            raise BackendError(
                what, where=variable, next=f"{then}, and set the key in fleet.slurm instead"
            )
        option = f"--{name}" if name in FLAGS else f"--{name}={value}"
        notes.append(f"{variable} sets {option}")
        own: dict[str, Any] = (
            {"partition": value} if name == "partition" else {"options": (*slurm.options, option)}
        )
        slurm = replace(slurm, **own)
    return replace(config, fleet=replace(config.fleet, slurm=slurm)), notes


def site_options(engine: SlurmClient) -> dict[str, str]:
    """Returns the sbatch variables from the login environment of the machine with sbatch."""
    entries = engine.ask(["env", "-0"], "", None).out.split("\0")
    found = {
        name.rpartition("\n")[2]: value
        for name, _, value in (entry.partition("=") for entry in entries)
    }
    said = {
        name: value
        for name, value in found.items()
        if re.fullmatch("SBATCH_[A-Z0-9_]+|SLURM_HINT", name)
    }
    if (wait := said.pop(WAIT, "")) and SWITCHES in said:  # WAIT has no effect without SWITCHES
        said[SWITCHES] += f"@{wait}"
    return said


def option_of(variable: str) -> str:
    """Returns the option that the environment variable sets."""
    return NAMED.get(variable, variable.removeprefix("SBATCH_").lower().replace("_", "-"))


def _who_says(config: Config, name: str) -> str:
    """Returns the config key that already sets this option, or "" if the site may set it."""
    slurm, ours = config.fleet.slurm, taken(config)
    if any(f"{given}=".startswith(f"--{name}=") for given in slurm.options):
        return "fleet.slurm.options"
    key = ours.get(name, "")
    is_said = name in ours and getattr(slurm, key.removeprefix("fleet.slurm."), key) is not None
    return key or "trainfleet" if is_said or not KNOWN.fullmatch(name) else ""
