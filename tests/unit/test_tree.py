"""The tree in which ranks vote: every rank has its place once, and no way is longer than the logarithm of the world."""

from __future__ import annotations

import math

import pytest

from trainfleet.engine.world import FAN, levels


@pytest.mark.parametrize("local", [1, 2, 3, 8, 16, 32, 192])
@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 16, 17, 257, 1250])
def test_every_rank_has_one_way_up_and_the_first_has_them_all(nodes: int, local: int) -> None:
    size = nodes * local
    members = list(range(size))
    found = levels(size, local)
    for groups in found:
        assert [rank for group in groups for rank in group] == members, (
            "of this level, each once, in their order"
        )
        assert max(map(len, groups)) <= FAN
        members = [group[0] for group in groups]
    assert members == [0]
    assert len(found) <= math.ceil(math.log(max(nodes, 2), FAN)) + math.ceil(
        math.log(max(local, 2), FAN)
    )


def test_the_ranks_of_a_node_come_to_one_answer_before_they_talk_to_others() -> None:
    assert levels(8, 4) == [[list(range(8))]], "few ranks are one group"
    first, second = levels(24, 8)
    assert first == [list(range(8)), list(range(8, 16)), list(range(16, 24))] and second == [
        [0, 8, 16]
    ]


def test_a_world_of_one_needs_nobody() -> None:
    assert levels(1, 1) == []
