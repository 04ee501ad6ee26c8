"""The pace of one head over SSH: how often it polls hosts, and when a silent one counts as lost.
Pure.

A head with two cores handles about 64 answers a second (tests/bench/LOG.md). So more hosts mean
longer pauses between two polls of each. A host is lost when it has missed polls, never because many
hosts delay its turn.
"""

from __future__ import annotations

ANSWERS = 64  # a second
LOOK_EVERY = 1.0  # seconds, for up to ANSWERS hosts
LOST_AFTER = (
    9.0  # seconds without an answer, likewise; a dead link shows after 8 (hosts/transport.py)
)
MOST_NODES = 512  # of a job over SSH: each is polled every 8 s, and counts as lost after 30


def look_every(hosts: int) -> float:
    """Returns the seconds between two polls of one host."""
    return max(LOOK_EVERY, hosts / ANSWERS)


def lost_after(hosts: int) -> float:
    """Returns the seconds without an answer until a host is lost: time for three polls, including
    the last one's timeout.
    """
    return max(LOST_AFTER, 3 * look_every(hosts) + LOST_AFTER - 3 * LOOK_EVERY)


def spread(hosts: int) -> float:
    """Returns the seconds until all hosts have been polled, if each answers at once."""
    return hosts / ANSWERS
