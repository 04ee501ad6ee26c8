"""Which node's links are bad, from what kernels know; and that this machine's kernel tells it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from trainfleet.health import tcp_stats, watchdog
from trainfleet.health.heartbeat_format import Beat
from trainfleet.health.tcp_stats import NodeLinks, PeerLink, read_links, slow_nodes


def fleet(
    nodes: int, bad: int | None = None, ms: float = 0.3, lost: float = 0.0, sent: int = 1000
) -> dict[int, NodeLinks]:
    """A ring of nodes; all links of `bad` take so many ms, or lose that share."""
    found = {}
    for node in range(nodes):
        peers = {}
        for other in {(node + 1) % nodes, (node - 1) % nodes} - {node}:
            is_bad = bad in (node, other)
            peers[f"10.0.0.{other}"] = PeerLink(
                ms if is_bad else 0.3, sent, round(sent * lost) if is_bad else 1
            )
        found[node] = NodeLinks(node, 1, (f"10.0.0.{node}",), peers)
    return found


BEFORE = {node: NodeLinks(node, 1, (f"10.0.0.{node}",), {}) for node in range(8)}


@pytest.mark.parametrize("nodes", [3, 4, 8])
def test_the_node_whose_best_link_is_bad_is_named(nodes: int) -> None:
    assert slow_nodes(BEFORE, fleet(nodes)) == {}
    found = slow_nodes(BEFORE, fleet(nodes, bad=2, ms=200))
    assert list(found) == [2] and "round-trip time of 200 ms" in found[2] and "0.3 ms" in found[2]
    found = slow_nodes(BEFORE, fleet(nodes, bad=2, lost=0.3))
    assert list(found) == [2] and "30% of the packets" in found[2]


def test_what_tells_nothing_blames_nobody() -> None:
    assert slow_nodes(BEFORE, fleet(2, bad=1, ms=20)) == {}, (
        "of two nodes neither has another to be compared with"
    )
    assert slow_nodes(BEFORE, fleet(4, bad=2, ms=2)) == {}, "two milliseconds slow nothing down"
    assert slow_nodes(fleet(4, bad=2, ms=200), fleet(4, bad=2, ms=200)) == {}, (
        "nothing was sent since"
    )
    assert slow_nodes({}, {}) == {}


def with_another(
    found: dict[int, NodeLinks], node: int, ms: float, lost: int = 0
) -> dict[int, NodeLinks]:
    """The fleet, with a connection of a node to a machine that is none of its nodes."""
    told = found[node]
    return found | {node: replace(told, peers=told.peers | {"10.0.9.9": PeerLink(ms, 500, lost)})}


@pytest.mark.parametrize(
    ("bad", "words"),
    [({"ms": 200}, "round-trip time of 200 ms"), ({"lost": 0.05}, "5% of the packets")],
)
def test_what_is_bad_on_any_network_is_named_though_the_run_is_as_fast_as_ever(
    bad: dict[str, float], words: str
) -> None:
    """200 ms or 5 % loss, also from the first step on, and also of two nodes."""
    found = slow_nodes(BEFORE, fleet(4, bad=2, **bad), slower=False)  # type: ignore[arg-type]
    assert list(found) == [2] and words in found[2]
    two = fleet(2, bad=1, **bad)  # type: ignore[arg-type]
    found = slow_nodes(BEFORE, two, slower=False)
    assert list(found) == [None] and words in found[None], "nothing tells which of the two it is"
    assert list(slow_nodes(BEFORE, with_another(two, 0, 0.2), slower=False)) == [1], (
        "node 0 has a good link to another machine"
    )
    assert list(
        slow_nodes(BEFORE, with_another(with_another(two, 0, 0.2), 1, 0.3), slower=False)
    ) == [None]
    assert list(slow_nodes(BEFORE, with_another(two, 0, 180.0), slower=False)) == [None]
    assert (
        slow_nodes(BEFORE, fleet(4, bad=2, ms=20), slower=False)
        == {}
        == slow_nodes(BEFORE, fleet(4, bad=2, lost=0.012), slower=False)
    )


def test_what_nodes_leave_is_read_only_where_it_can_be_true(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").mkdir()
    good = {
        "node": 1,
        "attempt": 3,
        "addresses": ["10.0.0.1"],
        "peers": {"10.0.0.2": {"ms": 0.5, "sent": 5, "again": 0}},
    }
    for number, record in enumerate(
        (good, good | {"attempt": 2}, good | {"node": "x"}, good | {"peers": {"a": 1}}, [])
    ):
        (tmp_path / f"heartbeats/links-{number}").write_text(json.dumps(record))
    assert read_links(tmp_path, 3) == {
        1: NodeLinks(1, 3, ("10.0.0.1",), {"10.0.0.2": PeerLink(0.5, 5, 0)})
    }


@pytest.mark.skipif(sys.platform != "linux", reason="netlink is Linux's")
def test_this_machine_s_kernel_tells_of_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tcp_stats.ipaddress, "ip_address", lambda text: type("Outer", (), {"is_loopback": False})
    )
    with socket.create_server(("127.0.0.2", 0)) as server, socket.socket() as near:
        near.bind(("127.0.0.3", 0))
        near.connect(server.getsockname())
        far = server.accept()[0]
        for _ in range(50):
            near.sendall(b"x" * 100)
            far.recv(100)
        found = [told for told in tcp_stats.connections() if told[:2] == ("127.0.0.3", "127.0.0.2")]
        seen = subprocess.run(
            ["ss", "-tinH", "src", "127.0.0.3"], capture_output=True, text=True, check=False
        ).stdout
        far.close()
    assert found and found[0][3] >= 50 and found[0][4] == 0 and 0 < found[0][2] < 100
    if seen:
        assert f"data_segs_out:{found[0][3]}" in seen


def test_a_run_that_is_slower_than_it_was_names_the_node_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    (tmp_path / "heartbeats").mkdir()
    sentry = watchdog.Sentry(tmp_path, ranks=4, attempt=1)

    def leave(sent: int, bad: int | None) -> None:
        for node, told in fleet(4, bad, ms=80, sent=sent).items():
            (tmp_path / f"heartbeats/links-{node}").write_text(json.dumps(asdict(told)))

    def steps(seconds: float) -> None:
        for number in range(64):
            beat = Beat(
                number % 4,
                number % 4,
                1,
                1,
                "step",
                int(clock[0]) + number,
                0.0,
                clock[0] + number,
                seconds,
            )
            sentry.dog.look({beat.rank: beat}, clock[0] + number)
        clock[0] += 64

    steps(0.1)
    leave(1000, 2)
    assert sentry.slow_links() == {}
    clock[0] += 20
    leave(1500, 2)
    assert sentry.slow_links() == {}, "as fast as ever: 80 ms are nobody's fault yet"
    steps(0.5)
    leave(2000, 2)
    assert sentry.slow_links() == {}, "the first look has nothing to compare with"
    for sent, bad in ((3000, 1), (4000, 2), (5000, None), (6000, 2)):
        clock[0] += 20
        leave(sent, bad)
        assert sentry.slow_links() == {}, "of one comparison alone nobody is named"
    clock[0] += 20
    leave(7000, 2)
    found = sentry.slow_links()
    assert list(found) == [2] and found[2].endswith("steps take 5.0 times as long as before")
    clock[0] += 20
    leave(8000, 2)
    assert sentry.slow_links() == {}
