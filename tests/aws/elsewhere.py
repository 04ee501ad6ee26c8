"""The pretended account for other processes of this machine: `python elsewhere.py VERB WORDS...` is a verb typed with its credentials.

ACCOUNT in the environment says where the account listens; `attach()` has this process's requests answered there.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

VARIABLE = "TRAINFLEET_TEST_ACCOUNT"
METAL = Path(__file__).parent / "metal_types"
SPEED = "TRAINFLEET_TEST_SPEED"  # how much faster than this machine's the account's clock goes, where it does


@contextmanager
def served(account: Any) -> Iterator[str]:
    """What to put into VARIABLE."""
    key = os.urandom(8)
    with Listener(("127.0.0.1", 0), authkey=key) as listener:

        def accept() -> None:
            while True:
                try:
                    threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()
                except (OSError, EOFError):
                    return

        def answer(connection: Connection) -> None:
            try:
                while True:
                    try:
                        reply: Any = account.respond(*connection.recv())
                    except EOFError:
                        return
                    except Exception as error:
                        reply = error
                    connection.send(reply)
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield f"{listener.address[1]}:{key.hex()}"  # type: ignore[index]


def attach() -> None:
    """From now on this process's requests to AWS go to the account that VARIABLE names."""
    from trainfleet.cloud import calls, clock

    port, _, key = os.environ[VARIABLE].partition(":")
    connection, lock = (
        Client(("127.0.0.1", int(port)), authkey=bytes.fromhex(key)),
        threading.Lock(),
    )

    def send(*asked: Any) -> dict[str, Any]:
        with lock:
            connection.send(asked)
            reply = connection.recv()
        if isinstance(reply, BaseException):
            raise reply
        return reply  # type: ignore[no-any-return]

    calls.send = send
    if speed := os.environ.get(SPEED):
        clock.sleep = lambda seconds: time.sleep(seconds / float(speed))
        os.environ["PYTHONPATH"] = (
            f"{METAL}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # what a verb starts knows it too
        )
        runpy.run_path(str(METAL / "sitecustomize.py"))


if __name__ == "__main__":
    attach()
    from trainfleet.cli import main

    sys.exit(main(sys.argv[1:]))
