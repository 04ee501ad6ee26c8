"""Locates and stops active runs. Stopping sends a request, waits, and verifies that no process is
left. Also runs EleutherAI's lm-evaluation-harness on a run's exported model (make eval TASKS=...).
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ..backends import Backend, backend_of
from ..backends.base import Handle, Status, load_job
from ..backends.run_storage import Here, Place
from ..config import Config, load_resolved, platforms
from ..config.host_list import parse_hosts
from ..process.install_paths import installing
from ..process.processes import run_module
from ..report.history import History
from ..run.run_folder import Run, is_locked
from ..trust.errors import BackendError, ConfigError, Problem, RunError
from ..trust.spelling import distance
from ..trust.untrusted_input import show
from .command import Variables, config_of, run_named, run_trained, settings_of

ANSWERS = 2  # timeout in seconds for a scheduler to report why a job is waiting
# Maximum seconds without progress, and in total, before a stop gives up. The run needs time to
# finish a step and write a checkpoint.
PATIENCE, LONGEST = (120.0, 1800.0)
# Seconds for a launcher to notice that its job has ended. It polls Slurm at most every 15 s.
LAUNCHER_ENDS = 30.0
NAMES = "from lm_eval.tasks import TaskManager; print(*TaskManager().all_tasks, sep='\\n')"
PATTERN = "*?/"  # characters that indicate a task pattern or the path of a user's task file


def place_of(variables: Variables) -> Place:
    """Returns where the config's run is stored."""
    run = run_named(variables)
    backend = backend_known(run, variables)
    return backend.place(run) if backend else Here(run)


def forwarded(verb: str, variables: Variables, config: Config | None = None) -> int | None:
    """Runs a command that needs a run's files on the machine that has them. Returns the exit code,
    or None if the files are on this machine.
    """
    run = run_named(variables)
    config = config or config_known(run, variables)
    if config is None or is_nowhere(config):
        return None
    with backend_of(config).place(run) as place:
        return place.forward(verb, config, dict(variables))


def export(variables: Variables) -> int:
    """Exports the newest checkpoint to the folder OUT, running on the machine that has the
    checkpoint. Returns the exit code.
    """
    platforms.require_new(Path(variables["OUT"]))  # Fails early, before loading anything.
    if (code := forwarded("export", variables)) is not None:
        return code
    form = variables.get("FORMAT") or platforms.HUGGINGFACE
    return run_module(
        "trainfleet.engine.export", str(run_trained(variables).folder), variables["OUT"], form
    )


def stop(place: Place, run: Run, variables: Variables) -> bool:
    """Asks a run to stop at its next step. Returns True once it has stopped, or False after a
    timeout.

    The timeout is PATIENCE seconds without progress, or LONGEST seconds in total.
    """
    place.ask_to_stop()
    print(f"asked {run.name} to save a checkpoint and stop at its next step")
    began = heard = time.monotonic()
    before = bytes_written(run)
    while place.is_running() or nodes_at_work(variables):
        now = time.monotonic()
        if (latest := bytes_written(run)) != before:
            heard, before = now, latest
        if now - heard > PATIENCE or now - began > LONGEST:
            return False
        time.sleep(place.pace)
        place.refresh()
    return True


def require_over(run: Run) -> None:
    """Waits for this machine's launcher after its ranks have ended. Raises RunError if it still
    holds the run's lock after LAUNCHER_ENDS seconds.
    """
    deadline = time.monotonic() + LAUNCHER_ENDS
    while is_locked(run.folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    if is_locked(run.folder):
        lock = run.folder / "lock"
        raise RunError(
            "the launcher has not exited",
            where=str(run.folder),
            why="its ranks have ended, but it still holds the run's lock",
            next=f"press Ctrl-C twice in its terminal, or kill it; run fuser {lock} to find it",
        )


def bytes_written(run: Run) -> int:
    """Returns the total size of the run's local metrics and events, which grows while the run makes
    progress.
    """
    return sum(
        path.stat().st_size for path in (run.metrics, *run.events.glob("*.jsonl")) if path.exists()
    )


def nodes_at_work(variables: Variables) -> tuple[str, ...]:
    """Returns the nodes on which the run's processes are active, with or without a launcher. Raises
    BackendError if a node can't be reached.
    """
    run = run_named(variables)
    if (backend := backend_known(run, variables)) is None:
        return ()
    handle = backend.find(run)
    status = backend.status(handle)
    require_known(run, handle, status)
    nodes = (
        () if status.ended else [node for node in range(handle.nodes) if node not in status.exits]
    )
    return tuple(
        handle.hosts[node] if node < len(handle.hosts) else f"node {node}" for node in nodes
    )


def orphan_note(run: Run, variables: Variables) -> str:
    """Returns a note if a run's status is running but its launcher is gone, otherwise ""."""
    if run.read_results().get("status") != "running":
        return ""
    nodes = nodes_at_work(variables)
    if nodes:
        return (
            f"\nits launcher is gone; {', '.join(nodes)} continue without it; "
            "run make train to take over, or make stop to end it"
        )
    return (
        "\nits launcher and processes are gone; run make train to resume from the last checkpoint"
    )


def heard_now(run: Run, variables: Variables) -> str | None:
    """Returns the scheduler's current reason for a job that was last seen waiting. Returns "" for
    other jobs and for runs led by another machine. Returns None if the query fails, exceeds ANSWERS
    seconds, or is interrupted by Ctrl-C.
    """
    waited = History(run, {}, [], run.read_events(), "").waits_for
    backend = backend_known(run, variables) if waited else None
    if backend is None or backend.hands_over or not (job := load_job(run)):
        return ""
    # The default handler raises KeyboardInterrupt, which the backend's `except Exception` clauses
    # don't catch.
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(ANSWERS)
    try:
        status = backend.status(job[0])
        return f"{status.phase.value}: {status.reason}".rstrip(": ")
    except (BackendError, KeyboardInterrupt):
        return None
    finally:
        signal.alarm(0)


def require_known(run: Run, handle: Handle, status: Status) -> None:
    """Raises a BackendError listing unreachable nodes, because processes may still be running on
    them.
    """
    if status.lost:
        rows = "\n".join(f"  {handle.hosts[node]}: {why}" for node, why in status.lost.items())
        what = f"processes of {run.name} may still be running\n{rows}"
        raise BackendError(what, next="run make doctor, then the same command again")


def end(variables: Variables) -> None:
    """Kills the run's remaining processes on all nodes, and verifies that they are gone.

    Raises:
        BackendError: a node can't be reached, or a process does not die. The error lists the nodes.
    """
    run = run_named(variables)
    if (backend := backend_known(run, variables)) is None:
        return
    handle = backend.find(run)
    backend.stop(handle, at_once=True)
    require_known(run, handle, backend.status(handle))
    if handle.hosts:
        print(f"no process of {run.name} is running on the fleet's {len(handle.hosts)} hosts")


def config_known(run: Run, variables: Variables) -> Config | None:
    """Returns the run's stored config. If it is missing or from another trainfleet version, returns
    the command's config. Returns None if neither is readable.
    """
    if run.config.exists():
        with suppress(ConfigError):
            config = load_resolved(run.config)
            # If the name differs, this is another run's config; commands would query or remove the
            # wrong run.
            if config.name == run.name:
                return config
    with suppress(ConfigError):  # Commands that only read a run do not need a valid config.
        return config_of(settings_of(variables))[0]
    return None


def backend_known(run: Run, variables: Variables) -> Backend | None:
    """Returns the backend on which the run may be active, or None if the config is unknown or the
    fleet has no machines yet.
    """
    config = config_known(run, variables)
    return None if config is None or is_nowhere(config) else backend_of(config)


def is_nowhere(config: Config) -> bool:
    """Returns whether the fleet has no machines yet, so the run can't have been active."""
    return not backend_of(config).lingers


def runs_programs(config: Config) -> bool:
    """Returns whether connecting to the hosts runs a program on this machine, which a plan must not
    do.
    """
    if config.fleet.ssh.config is None:
        return False
    from ..hosts import ssh_config  # Deferred because it imports SSH modules.

    return ssh_config.runs_programs(config.fleet.ssh)


def say_unheard(config: Config) -> None:
    """Warns about settings in fleet.ssh.config that ssh applies but trainfleet ignores."""
    if config.fleet.ssh.config:
        from ..hosts import ssh_config  # Deferred because it imports SSH modules.

        if words := ssh_config.unheard(config.fleet.ssh, parse_hosts(config.fleet.hosts)):
            print(
                f"warning: {config.fleet.ssh.config} has settings that trainfleet ignores: "
                f"{', '.join(words)}; run make doctor to check the hosts without them"
            )


def evaluate(variables: Variables, tasks: str) -> int:
    """Runs lm-eval on the newest checkpoint and keeps the results in the run folder. Returns the
    exit code.

    Raises:
        ConfigError: lm-eval is not installed or does not support one of the tasks.
    """
    if importlib.util.find_spec("lm_eval") is None:
        message = "needs lm-eval, which is not installed"
        raise ConfigError.of("TASKS", message, next=installing("eval"))
    # Uses a separate process because lm_eval imports torch.
    known = subprocess.run(
        [sys.executable, "-c", NAMES], capture_output=True, text=True, check=False
    )
    require_known_tasks(tasks, known.stdout.split())
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        if code := export({**variables, "OUT": str(model)}):
            return code
        found = run_named(variables).folder / "evaluation"
        words = [
            "--model",
            "hf",
            "--model_args",
            f"pretrained={model}",
            "--tasks",
            tasks,
            "--output_path",
            str(found),
        ]
        return run_module("lm_eval", *words)


def require_known_tasks(tasks: str, known: list[str]) -> None:
    """Raises a ConfigError listing unknown tasks with the closest known names. Accepts any task if
    `known` is empty.
    """
    named = [task.strip() for task in tasks.split(",")]
    unknown = [
        task
        for task in named
        if known and task not in known and not any(sign in task for sign in PATTERN)
    ]
    if unknown:
        said = [
            f"lm-eval has no task {show(task)}; nearest: {_near(task, known)}" for task in unknown
        ]
        problems = [Problem(0, "TASKS", "", message) for message in said]
        raise ConfigError(problems, next=f"run {sys.executable} -m lm_eval ls tasks to list them")


def _near(task: str, known: list[str]) -> str:
    return ", ".join(sorted(known, key=lambda name: distance(task.lower(), name.lower()))[:3])
