"""make clean: stops what runs and removes what can be made again; PURGE=1 removes what the named config made: run and dataset."""

from __future__ import annotations

from ..errors import BackendError
from ..launch import cleaning, whereabouts
from ..launch.settings import run_named
from .variables import Variables, flag


def main(variables: Variables, started: float) -> int:
    purge, sure, run = flag(variables, "PURGE"), flag(variables, "YES"), run_named(variables)
    made = cleaning.made_by(run, whereabouts.config_known(run, variables))
    with whereabouts.place_of(variables) as place:
        try:
            place.refresh()
            if place.is_running():
                whereabouts.stop(place, run, started)
            whereabouts.end(variables)
        except BackendError:
            cleaning.remove_remakeable()  # what is here can be tidied, whatever is the matter there
            raise
        cleaning.remove_remakeable()
        return cleaning.purge(place, made, sure) if purge else cleaning.keep(place, made)
