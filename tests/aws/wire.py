"""The pretended account for other processes of the same test: their requests come to it over a socket.

python -m aws.wire SOCKET setup NODES=4      the verb as `python -m trainfleet` has it, with that account in place of AWS
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from .account import Account


@contextmanager
def served(account: Account, socket: Path) -> Iterator[None]:
    """The account answers on that socket."""
    lock = threading.Lock()

    def talk(connection: Any) -> None:
        while True:
            try:
                asked = connection.recv()
            except (EOFError, OSError):
                return
            try:
                with lock:
                    answer = account.carry(*asked)
                connection.send((answer, None))
            except Exception as error:
                response = getattr(error, "response", None)
                connection.send((None, response if response else str(error)))

    def listen() -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    with Listener(str(socket), "AF_UNIX") as listener:
        threading.Thread(target=listen, daemon=True).start()
        yield


def plug(socket: str, speed: float) -> None:
    """From now on that account is AWS for this process."""
    from trainfleet.cloud import calls, clock

    from . import validation

    connection, lock = Client(socket, "AF_UNIX"), threading.Lock()

    def carry(region: str, service: str, operation: str, request: Mapping[str, Any]) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        with lock:
            connection.send((region, service, operation, dict(request)))
            answer, refused = connection.recv()
        if refused is not None:
            raise ClientError(refused, operation) if isinstance(refused, dict) else AssertionError(refused)
        found: dict[str, Any] = answer
        return found

    validation.install()
    calls.carry, clock.sleep = carry, lambda seconds: time.sleep(seconds / speed)


if __name__ == "__main__":
    plug(sys.argv[1], float(os.environ["AWS_SPEED"]))
    sys.argv = ["trainfleet", *sys.argv[2:]]
    runpy.run_module("trainfleet", run_name="__main__")
