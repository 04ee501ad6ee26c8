"""make watch: serves the run's report on this machine, drawn anew while the run goes on; Ctrl-C
ends it, and not the run.
"""

from __future__ import annotations

import threading
import time

from ..backends.run_storage import Place
from ..launch.command import run_named
from ..launch.run_location import place_of
from ..report import html
from ..report.server import Server
from ..run.run_folder import Run
from ..trust import untrusted_input
from ..trust.errors import BackendError, ConfigError, RunError
from .variables import Variables, number

LARGEST_PORT = 65535
EVERY = 10.0  # seconds between two looks at the run


def main(variables: Variables, started: float) -> int:
    run, port = run_named(variables), number(variables, "PORT", 0)
    if port > LARGEST_PORT:
        message = f"must be a port, up to {LARGEST_PORT}, not {port}"
        raise ConfigError.of("PORT", message, next="PORT=8642, or leave it out")
    if not run.config.exists():
        raise RunError("was never started", where=str(run.folder), next="make train")
    with place_of(variables) as place:
        _draw(run, place)
        server = served(run, port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"{run.name}: {server.link}\nCtrl-C ends this page, and not the run", flush=True)
        try:
            while True:
                time.sleep(max(EVERY, place.pace))
                _draw(run, place)
        except KeyboardInterrupt:
            print()
        finally:
            server.shutdown()
    return 0


def served(run: Run, port: int) -> Server:
    """The page's server, on `port` where one was asked for. ConfigError where another program has
    it.
    """
    try:
        return Server(
            lambda: untrusted_input.read_bytes(run.report, 4 * untrusted_input.RECORD), port or None
        )
    except OSError as error:
        message = f"{port} can't be had: {error.strerror}"
        raise ConfigError.of(
            "PORT", message, next="PORT=another, or leave it out: then any that is free is taken"
        ) from error


def _draw(run: Run, place: Place) -> None:
    """Brings the run folder up to date and draws; a fleet that does not answer leaves the page as
    it was seen last.
    """
    try:
        place.refresh()
    except BackendError as error:
        print(f"as last seen: {error}", flush=True)
    html.write(run)
