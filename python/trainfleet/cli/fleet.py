"""Verbs for the fleet: setup, images, health checks, costs and teardown."""

from __future__ import annotations

import io
from collections.abc import Iterable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from ..launch.command import config_of, config_to_examine, run_named, settings_of
from ..trust.errors import BackendError, ConfigError, RunError
from ..trust.safe_output import is_agreed
from .variables import Variables, flag

if TYPE_CHECKING:
    from ..backends.base import Machines
    from ..backends.run_storage import Place
    from ..cloud.inventory import OwnedResource
    from ..run.run_folder import Run


def setup(variables: Variables, started: float) -> int:
    """Runs the setup steps that follow the creation of .venv. For the local backend, prints the
    devices available for training.
    """
    from ..launch.provisioning import make_ready

    return make_ready(config_of(settings_of(variables))[0], flag(variables, "YES"))


def build(variables: Variables, started: float) -> int:
    """Builds the container image for fleet.platform on this machine, from docker/ and the lock."""
    from ..launch import job_image

    return job_image.build(config_of(settings_of(variables))[0])


def push(variables: Variables, started: float) -> int:
    """Pushes the container image to ECR under a content-based tag. Builds the image if it is
    missing.
    """
    from ..launch import job_image

    return job_image.push(config_of(settings_of(variables))[0])


def image(variables: Variables, started: float) -> int:
    """Creates a machine image (AMI) for nodes of the ec2 backend. `build` creates container
    images.
    """
    from ..launch.provisioning import bake

    return bake(config_of(settings_of(variables))[0])


def doctor(variables: Variables, started: float) -> int:
    """Checks the fleet's health, and prints each host's problems with a command that fixes or
    diagnoses them.

    LIFT=host releases a host from quarantine.
    """
    from ..launch.provisioning import examine

    lifted = variables.get("LIFT", "").replace(",", " ").split()
    config, faults = config_to_examine(settings_of(variables)), dict[str, list[str]]()
    if not flag(variables, "JSON"):
        return examine(config, lifted, faults)
    from ..report.json_output import DoctorOutput, HostHealth, emit

    with redirect_stdout(io.StringIO()) as said:
        code = examine(config, lifted, faults)
    hosts = tuple(HostHealth(name, tuple(found)) for name, found in faults.items())
    emit(DoctorOutput(code == 0, hosts, tuple(said.getvalue().splitlines())))
    return code


def ls(variables: Variables, started: float) -> int:
    """Lists all configs' resources in the region, found only by tag, with cost and age."""
    from ..backends import backend_of

    config, as_json = config_of(settings_of(variables))[0], flag(variables, "JSON")
    if not backend_of(config).machines().made:
        if as_json:
            _emit(None, ())
        else:
            backend = config.fleet.backend
            print(
                f"the {backend} backend creates no machines, so it has no resources that cost money"
            )
        return 0
    from ..cloud.calls import Calls, region_of
    from ..cloud.inventory import find, require_seen, table, total, weighed

    region = region_of(config)
    calls = Calls(region)
    everything = list(weighed(calls, find(calls)))
    found = [one for one in everything if one.id]
    if as_json:
        _emit(region, everything)
    elif found:
        print(
            *table(found),
            f"{len(found)} resource{'s' * (len(found) > 1)} in {region}: {total(found)}",
            "next: make clean removes this config's resources; CONFIG=path selects another config; "
            "PURGE=1 also removes resources with data",
            sep="\n",
        )
    require_seen(everything, region, "make ls")
    if not found and not as_json:
        print(f"trainfleet has no resources in {region}")
    return 0


def _emit(region: str | None, found: Iterable[OwnedResource]) -> None:
    from ..report.json_output import LsOutput, ResourceState, emit

    rows = (
        ResourceState(one.kind, one.id, one.config, one.what, one.since, one.usd, one.holds_data)
        for one in found
    )
    emit(LsOutput(region, tuple(rows)))


def clean(variables: Variables, started: float) -> int:
    """Stops the run, tears down its machines, and deletes files that can be recreated. PURGE=1 also
    deletes all data.
    """
    from ..backends import is_guest
    from ..launch import cleaning, run_location

    run, sure = run_named(variables), flag(variables, "YES")
    purge = flag(variables, "PURGE", "all")
    config = run_location.config_known(run, variables)
    made, machines = cleaning.made_by(run, config), cleaning.machines_of(config)
    if config and is_guest(config):
        print(
            f"the machines are kept, because they belong to the config {config.fleet_name}; run "
            "make clean with that config to remove them"
        )
    if machines and not sure and not purge:  # with PURGE, the confirmation prompt comes later
        _require_consent(machines)
    try:
        with run_location.place_of(variables) as place:
            _end(place, run, variables, sure)
            if not machines:
                cleaning.remove_remakeable()
                if not purge:
                    return cleaning.keep(place, made)
                code = cleaning.purge(place, made, sure)
                everything = variables["PURGE"].lower() == "all"
                return cleaning.end_of_hosts(config, everything, sure) or code
    except (BackendError, RunError) as error:
        if not machines:
            # Clean up this machine even if cleaning up the fleet fails.
            cleaning.remove_remakeable()
            raise
        print(f"warning: {error}\nthe machines are removed anyway")
    return cleaning.take_down(machines, cleaning.folders_of(config, run), made, purge, sure)


def _end(place: Place, run: Run, variables: Variables, sure: bool) -> None:
    """Stops the run, or cancels the launch that is starting it. Raises ConfigError if either is
    active and the user declines.
    """
    from ..launch import launching, run_location

    place.refresh()
    running = place.is_running()
    begun = None if running else launching.under_way(place)
    ask = f"{run.folder} is running; save a checkpoint and stop it?"
    if (running or begun) and not sure and not is_agreed(ask):
        it = f"RUN={run.name}"
        then = f"run make clean {it} YES=1 to save a checkpoint and stop it, or make watch {it}"
        raise ConfigError.of(str(run.folder), "is running; nothing was changed", next=then)
    if running or (begun and not launching.cancel(place, run, begun)):
        run_location.stop(place, run, variables)
    run_location.end(variables)  # kill the run if it ignored the stop request


def _require_consent(machines: Machines) -> None:
    """Asks for confirmation before tearing down machines that cost money.

    Raises:
        ConfigError: the user declines, or there is no terminal for the prompt.
    """
    found = machines.costing()
    print("\n".join(found), end="\n" if found else "")
    if found and not is_agreed("stop all jobs on these machines and remove the machines?"):
        what = f"would remove machines that cost {found[-1]}; nothing was changed"
        raise ConfigError.of("make clean", what, next="make clean YES=1")
