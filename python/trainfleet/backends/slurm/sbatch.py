"""Builds the sbatch batch script: the resources that a job requests, and its nodes' commands. Pure.

Slurm runs the script on the first node of each allocation, and again after a requeue. The script
ensures that each token starts only one job, and uses srun to start trainfleet.node.entrypoint on
every node. Before the time limit, ranks save and exit, and the script requeues the job. Without a
launcher, launch/aftermath.py decides whether to restart after a failure. Sources:
slurm.schedmd.com, sbatch.html and srun.html (--signal, --requeue, --export, OUTPUT ENVIRONMENT
VARIABLES).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from shlex import quote

from ...config import Config
from ...hosts import preflight
from ...hosts.fleet import wanted_of
from ...node.placement import Placement, torchrun
from ...node.placements.slurm import PLACEMENT
from ...node.precompile import ahead
from ...node.supervisor import EXIT, WATCH
from ...plan.fabric_environment import NCCL_LOGS
from ...plan.job import WIDTH, Artifact, Job, fold
from ...run import contents, run_folder
from ..node_script import entrypoint_words

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
# writes a stop request, which ranks check at each step
ASK = '[ -e "$stop" ] || echo "{engine} the time limit is near" > "$stop"'
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
    step = fold(
        [*_srun(config, job, ground, job.nodes), *node, *map(quote, [ground.python, *words])],
        WIDTH,
    )
    notice = ASK.format(engine=run_folder.ENGINE) if job.beats else TERMINATE
    folder, line = (
        quote(str(job.folder)),
        "\n".join([*_with_preflight(config, job, ground, step)]),
    )
    start = contents.START.at(folder, job="$SLURM_JOB_ID", start="${SLURM_RESTART_COUNT:-0}")
    claim = contents.CLAIM.at(folder, token=f"${{{TOKEN}:-by-hand-$SLURM_JOB_ID}}")
    yield BODY.format(
        folder=folder, start=start, claim=claim, engine=run_folder.ENGINE, notice=notice, step=line
    ).rstrip()
    if config.fleet.slurm.requeue:
        judge = [ground.python, "-m", "trainfleet.launch.aftermath", str(job.folder)]
        judged = " ".join([*_srun(config, job, ground, 1), *map(quote, judge), '"$mine" "$near"'])
        yield AGAIN.format(judge=judged).rstrip()
    yield 'exit "$code"'


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
