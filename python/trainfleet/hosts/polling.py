"""The pace of one head over SSH: how often it polls hosts, and when a silent one counts as lost.
Pure.

A head of two cores takes in some 64 answers a second (tests/bench/LOG.md). So the more hosts, the
longer the pause between two questions to one; a host is lost when it has missed some, never because
its turn comes later than it would with fewer.
"""

from __future__ import annotations

ANSWERS = 64  # a second
LOOK_EVERY = 1.0  # seconds, for as many hosts as that allows
LOST_AFTER = (
    9.0  # seconds without an answer, for as many; a dead link shows after 8 (hosts/transport.py)
)
MOST_NODES = 512  # of a job over SSH: each is asked every 8 s, and missed after 30


def look_every(hosts: int) -> float:
    """Seconds between two questions to one host."""
    return max(LOOK_EVERY, hosts / ANSWERS)


def lost_after(hosts: int) -> float:
    """Seconds without an answer until a host is lost: time for three questions, of which the last
    may take until it fails.
    """
    return max(LOST_AFTER, 3 * look_every(hosts) + LOST_AFTER - 3 * LOOK_EVERY)


def spread(hosts: int) -> float:
    """Seconds that it takes until all hosts have been asked something that they answer at once."""
    return hosts / ANSWERS
