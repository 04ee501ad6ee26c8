"""make watch: serves the run's report on this machine, redrawn while the run continues; Ctrl-C ends
the page, not the run.
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
EVERY = 10.0  # seconds between two updates of the page


def main(variables: Variables, started: float) -> int:
    run, port = run_named(variables), number(variables, "PORT", 0)
    if port > LARGEST_PORT:
        message = f"must be a port, up to {LARGEST_PORT}, not {port}"
        raise ConfigError.of("PORT", message, next="PORT=8642, or omit it")
    if not run.config.exists():
        raise RunError("was never started", where=str(run.folder), next="make train")
    with place_of(variables) as place:
        _draw(run, place)
        server = served(run, port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"{run.name}: {server.link}\nCtrl-C ends this page, not the run", flush=True)
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
    """Returns the page's server, on `port` if it is not 0. ConfigError if another program uses that
    port.
    """
    try:
        return Server(
            lambda: untrusted_input.read_bytes(run.report, 4 * untrusted_input.RECORD), port or None
        )
    except OSError as error:
        message = f"{port} can't be used: {error.strerror}"
        raise ConfigError.of(
            "PORT", message, next="PORT=another, or omit it to use any free port"
        ) from error


def _draw(run: Run, place: Place) -> None:
    """Updates the run folder and draws the page; if the fleet does not respond, the page shows the
    last known state.
    """
    try:
        place.refresh()
    except BackendError as error:
        print(f"as last seen: {error}", flush=True)
    html.write(run)
