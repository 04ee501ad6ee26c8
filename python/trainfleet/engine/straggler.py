"""Finds the slowest rank, for a line of metrics."""

from __future__ import annotations

from statistics import median

from ..health.heartbeat import Heart
from ..health.heartbeat_format import Beat, Beats
from ..run.run_folder import Record


class Slowest:
    """The rank with the longest own work in its newest complete step.

    It is found in the beats of all ranks (health/heartbeat_format.py), at most two seconds old.
    """

    def __init__(self, heart: Heart, ranks: int) -> None:
        """Starts reading beats; `heart` has met the others, as their attempt has its number by
        then.
        """
        self.beats, self.ranks = Beats(heart.folder, heart.attempt.number), ranks
        self.known: dict[int, Beat] = {}

    def measure(self) -> Record:
        """Returns `slowest_rank`, the seconds of that rank's work, and those of the median rank; {}
        until all ranks' can be seen.

        A folder that nodes do not share shows each node only its own ranks.
        """
        self.known |= self.beats.new()
        busy = {rank: beat.busy_seconds for rank, beat in self.known.items() if beat.busy_seconds}
        if len(busy) < max(2, self.ranks):
            return {}
        rank = max(busy, key=busy.__getitem__)
        return {
            "slowest_rank": rank,
            "slowest_own": round(busy[rank], 4),
            "median_own": round(median(busy.values()), 4),
        }
