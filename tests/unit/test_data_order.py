"""The order of samples: every one once an epoch, the same for any world size, and any place at once."""

from __future__ import annotations

import time

import numpy as np
import pytest

from trainfleet.data.order import permuted


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_an_epoch_holds_every_sample_once(n: int) -> None:
    for seed, epoch in ((0, 0), (1, 0), (1, 1), (2**31 - 1, 7)):
        assert sorted(permuted(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


def test_seeds_and_epochs_give_other_orders_that_look_random() -> None:
    n = 20_000
    orders = [permuted(np.arange(n), n, seed, epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    for i, order in enumerate(orders):
        assert abs(np.corrcoef(order.astype(float), np.arange(n))[0, 1]) < 0.03
        assert abs(np.corrcoef(order[:-1].astype(float), order[1:].astype(float))[0, 1]) < 0.03
        for other in orders[:i]:
            assert (order == other).mean() < 0.001


def test_places_far_in_a_huge_set_take_milliseconds() -> None:
    n = 10**12
    began = time.perf_counter()
    places = permuted(np.arange(10**11, 10**11 + 512), n, 1, 3)
    assert time.perf_counter() - began < 0.05
    assert len(set(places.tolist())) == 512 and int(places.max()) < n
    assert permuted([10**11 + 5], n, 1, 3)[0] == places[5]


def test_the_order_never_changes_between_versions() -> None:
    assert permuted(np.arange(8), 1000, 1, 0).tolist() == [806, 411, 712, 495, 621, 715, 81, 591]
