"""The key by which the nodes of an engine's job know each other (node/relay.py): node 0 makes it, the others read it from S3.

<bucket>/<folder>/meeting/<job and attempt> is there while the job runs. Whoever may read it may also read all else of the run.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress

from ..storage import s3
from ..trust.errors import BackendError, S3Error

WANTED = "TRAINFLEET_KEYED"  # the variable that is set where a job's nodes need a key
BYTES = 32
_KEY = re.compile(rf"[0-9a-f]{{{2 * BYTES}}}")


class SharedKey:
    """The key of one attempt of a job, below `folder`, the address of the run's folder."""

    def __init__(self, folder: str, attempt: str) -> None:
        self.address = f"{folder}/meeting/{attempt}"

    def make(self) -> str:
        """A new key, which the other nodes can read from now on. Raises S3Error."""
        key = secrets.token_hex(BYTES)
        s3.write(self.address, key.encode())
        return key

    def read(self) -> str:
        """The key that node 0 has made. Raises S3Error, and BackendError where there is none."""
        key = (s3.read(self.address) or b"").decode(errors="replace")
        if not _KEY.fullmatch(key):
            raise BackendError("holds no key of this job's node 0", where=self.address, next="make train starts it anew")
        return key

    def remove(self) -> None:
        """Removes the key once the job is done; one that stays behind opens nothing."""
        with suppress(S3Error):
            s3.remove_all([self.address])
