"""make clean: stops the run, takes machines down, removes files that can be made again; with
PURGE=1 also all data.
"""

from __future__ import annotations

from ..backends import is_guest
from ..backends.base import Machines
from ..launch import cleaning, launching, run_location
from ..launch.command import run_named
from ..trust.errors import BackendError, ConfigError, Problem, RunError, S3Error
from ..trust.safe_output import is_agreed
from .variables import Variables, flag


def main(variables: Variables, started: float) -> int:
    run, sure = run_named(variables), flag(variables, "YES")
    purge = flag(variables, "PURGE", "all")
    everything = variables.get("PURGE", "").lower() == "all"
    config = run_location.config_known(run, variables)
    made, machines = cleaning.made_by(run, config), cleaning.machines_of(config)
    if config and is_guest(config):
        print(
            f"the machines stay, as they belong to the config {config.fleet_name}; make clean "
            "with that config removes them"
        )
    if machines and not sure and not purge:  # a purge asks later
        _require_consent(machines)
    try:
        with run_location.place_of(variables) as place:
            place.refresh()
            running = place.is_running()
            begun = None if running else launching.under_way(place)
            if (
                (running or begun)
                and not sure
                and not is_agreed(f"{run.folder} is running; end it, with a checkpoint?")
            ):
                then = "make clean YES=1 ends it, with a checkpoint; make watch shows it"
                raise ConfigError(
                    [Problem(0, str(run.folder), "", "is running; nothing was changed")],
                    next=then,
                )
            if running or (begun and not launching.cancel(place, run, begun)):
                run_location.stop(place, run, variables)
            run_location.end(variables)  # also if it did not obey the request
            if not machines:
                cleaning.remove_remakeable()
                code = cleaning.purge(place, made, sure) if purge else cleaning.keep(place, made)
                return cleaning.end_of_hosts(config, everything, sure) or code if purge else code
    except (BackendError, RunError, S3Error) as error:
        if not machines:
            cleaning.remove_remakeable()  # cleans up here even if the fleet fails
            raise
        print(f"warning: {error}\nits machines are taken down anyway", flush=True)
    return cleaning.take_down(machines, cleaning.folders_of(config, run), made, purge, sure)


def _require_consent(machines: Machines) -> None:
    """Asks before machines that cost money are taken down.

    Raises:
        ConfigError: the answer is no, or there is no terminal to ask on.
    """
    found = machines.costing()
    print("\n".join(found), end="\n" if found else "")
    if found and not is_agreed("end all jobs on these machines, and remove them?"):
        what = f"would end machines that cost {found[-1]}; nothing was changed"
        raise ConfigError([Problem(0, "make clean", "", what)], next="make clean YES=1")
