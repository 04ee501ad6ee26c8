"""The order of samples: every one once an epoch, the same for any world size, and any place at once."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from trainfleet.data.shuffling import Order, apportion, fold, mix, permuted, windowed

FULL = Order(1, (1000,))
WINDOWED = Order(1, (1000,), None, 8, 5)
MIXED = Order(1, (300, 70, 2000), (5.0, 1.0, 2.0))
MIXED_WINDOWED = replace(MIXED, block=16, window=4)
ORDERS = [FULL, WINDOWED, MIXED, MIXED_WINDOWED]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_an_epoch_holds_every_sample_once(n: int) -> None:
    for key in ((0, 0), (1, 0), (1, 1), (2**31 - 1, 7)):
        assert sorted(permuted(np.arange(n), n, *key).tolist()) == list(range(n))
        for block, window in ((max(1, n // 50), 1), (4, 100), (16, 40), (1000, 5)):
            assert sorted(
                windowed(np.arange(n, dtype=np.uint64), n, block, window, *key).tolist()
            ) == list(range(n))


def test_seeds_and_epochs_give_other_orders_that_look_random() -> None:
    n = 20_000
    orders = [permuted(np.arange(n), n, seed, epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    for i, order in enumerate(orders):
        assert abs(np.corrcoef(order.astype(float), np.arange(n))[0, 1]) < 0.03
        assert abs(np.corrcoef(order[:-1].astype(float), order[1:].astype(float))[0, 1]) < 0.03
        for other in orders[:i]:
            assert (order == other).mean() < 0.001


def test_a_window_reads_few_blocks_at_a_time_and_each_once() -> None:
    places = windowed(np.arange(10_000, dtype=np.uint64), 10_000, 50, 10, 1, 0)
    seen = set[int]()
    for start in range(0, 10_000, 500):
        blocks = set((places[start : start + 500] // 50).tolist())
        assert len(blocks) == 10 and not blocks & seen
        seen |= blocks
    assert abs(np.corrcoef(places.astype(float), np.arange(10_000))[0, 1]) < 0.15


@pytest.mark.parametrize("order", ORDERS, ids=["full", "windowed", "mixed", "mixed and windowed"])
def test_any_slicing_gives_the_same_global_batches(order: Order) -> None:
    """World sizes 1, 2, then 3 → 8 → 4 with a resume between, over several epochs of every source."""
    first, batch = 990, 48
    hashes = []
    for worlds in ((1,), (2,), (3, 8, 4)):
        found = []
        for step in range(12):
            world = worlds[step * len(worlds) // 12]
            part, start = batch // world, first + step * batch
            ranks = [np.stack(order.at(start + rank * part, part)) for rank in range(world)]
            found.append(hashlib.sha256(np.concatenate(ranks, axis=1).tobytes()).hexdigest())
        hashes.append(found)
    assert hashes[0] == hashes[1] == hashes[2]
    assert len(set(hashes[0])) == 12


def test_every_source_has_its_share_and_its_own_epochs() -> None:
    sources, places = MIXED.at(0, 40_960)
    shares = np.bincount(sources.astype(int)) / 40_960
    assert np.allclose(shares, [5 / 8, 1 / 8, 2 / 8], atol=1e-3)
    for start in range(0, 40_960, 4096):
        part = np.bincount(sources[start : start + 4096].astype(int))
        assert (part == apportion((5, 1, 2), 4096)).all()
    for source, n in enumerate(MIXED.counts):
        mine = places[sources == source]
        count = np.bincount(mine.astype(int), minlength=n)
        assert count.max() - count.min() <= 1 + 4096 // n, (
            "no sample is ahead of another by more than a round"
        )


def test_shares_are_whole_and_none_is_nothing() -> None:
    assert apportion((1, 1, 1), 4096) in ([1366, 1365, 1365], [1365, 1366, 1365])
    for weights in ((1e-9, 1), (1, 2, 3, 4), (0.3,) * 100):
        shares = apportion(weights, 4096)
        assert sum(shares) == 4096 and min(shares) >= 1


@pytest.mark.parametrize(
    "order", [replace(order, counts=tuple(10**12 for _ in order.counts)) for order in ORDERS]
)
def test_a_place_far_in_a_huge_set_is_found_without_walking_there(order: Order) -> None:
    sources, places = order.at(512 * 10**9, 512)
    assert (
        len(set(zip(sources.tolist(), places.tolist(), strict=True))) == 512
        and int(places.max()) < 10**12
    )
    assert order.at(512 * 10**9 + 5, 1)[1][0] == places[5]


def test_keys_are_mixed_as_numbers_are() -> None:
    assert fold(12345) == int(mix(np.uint64(12345)))
    assert len({fold(*key) for key in ((0,), (0, 0), (1, 0), (0, 1), (1, 2), (2, 1))}) == 6


def test_the_order_never_changes_between_versions() -> None:
    found = [[array[:4].tolist() for array in order.at(3000, 8)] for order in ORDERS]
    assert found == [
        [[0, 0, 0, 0], [913, 462, 39, 274]],
        [[0, 0, 0, 0], [939, 463, 942, 21]],
        [[1, 0, 0, 2], [53, 71, 191, 1532]],
        [[1, 0, 0, 2], [22, 179, 98, 95]],
    ]
