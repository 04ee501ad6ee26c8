"""Where a run is at work, for the verbs that look at it, and its end: asked for, waited for, and proven."""

from __future__ import annotations

import time
from contextlib import suppress

from ..backends import backend_of
from ..backends.place import Here, Place
from ..backends.ssh import Ssh
from ..config import Config, load_resolved
from ..errors import BackendError, ConfigError, RunError
from ..processes import run_module
from ..runs import Run
from .settings import Variables, config_of, run_named, run_started, settings_of

PATIENCE = 120.0  # seconds: a step and a checkpoint


def place_of(variables: Variables) -> Place:
    """The place of the run that the config names."""
    run = run_named(variables)
    config = config_known(run, variables)
    return Here(run) if config is None or is_nowhere(config) else backend_of(config).place(run)


def carried_out(verb: str, variables: Variables, config: Config | None = None) -> int | None:
    """The exit code of a verb that needs what a run has made, where another machine has that and carries it out; else None."""
    run = run_named(variables)
    config = config or config_known(run, variables)
    if config is None or is_nowhere(config):
        return None
    with backend_of(config).place(run) as place:
        return place.carry_out(verb, config, dict(variables))


def export(variables: Variables) -> int:
    """Makes the newest checkpoint a Hugging Face folder here, OUT, wherever that checkpoint is; the exit code."""
    if (code := carried_out("export", variables)) is not None:
        return code
    return run_module("trainfleet.engine.export", str(run_started(variables).folder), variables["OUT"])


def stop(place: Place, run: Run, started: float) -> None:
    """Has a run that is at work stop at its next step, and returns when it has.

    Raises:
        RunError: no step came in time.
    """
    place.ask_to_stop()
    print(f"asked {run.name} to stop at its next step, with a checkpoint", flush=True)
    while place.is_running():
        if time.time() - started > PATIENCE:
            why = f"no step boundary came within {PATIENCE:.0f} s"
            next = "make logs FOLLOW=1; Ctrl-C twice where it runs ends it at once"
            raise RunError("it has not stopped yet", where=str(run.folder), why=why, next=next)
        time.sleep(place.pace)
        place.refresh()


def end(variables: Variables) -> None:
    """Kills what is left of the run that the config names, wherever that is, and looks again.

    Raises:
        BackendError: a node can't be reached, or a process does not die; by host.
    """
    run = run_named(variables)
    if (config := config_known(run, variables)) is None or is_nowhere(config):
        return
    backend = backend_of(config)
    handle = backend.find(run)
    backend.stop(handle, at_once=True)
    status = backend.status(handle)
    if status.lost:
        rows = "\n".join(f"  {handle.hosts[node]}: {why}" for node, why in status.lost.items())
        raise BackendError(f"it is not known that nothing of {run.name} runs any more\n{rows}", next="make clean again")
    if handle.hosts:
        print(f"nothing of {run.name} runs on the fleet's {len(handle.hosts)} hosts", flush=True)


def config_known(run: Run, variables: Variables) -> Config | None:
    """The run's own config; where there is none, or one of another version of this, the file's; None when neither can be read."""
    if run.config.exists():
        with suppress(ConfigError):
            config = load_resolved(run.config)
            if config.name == run.name:  # else it is another run's, and so is what would be asked and removed by it
                return config
    with suppress(ConfigError):  # a look needs none
        return config_of(settings_of(variables))[0]
    return None


def is_nowhere(config: Config) -> bool:
    """Whether there is no machine yet, so that its run can have been at work nowhere."""
    backend = backend_of(config)
    return isinstance(backend, Ssh) and backend.hands_over and not backend.located.fleet.hosts


def runs_programs(config: Config) -> bool:
    """Whether reaching the hosts runs a program on this machine, which a plan must not."""
    if config.fleet.ssh.config is None:
        return False
    from ..nodes import ssh_config  # loads SSH

    return ssh_config.runs_programs(config.fleet.ssh)
