"""The barrier: nodes that start apart meet, and one that never comes is named on every node that did."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable

import pytest

from trainfleet.node import barrier
from trainfleet.node.barrier import Missing
from trainfleet.node.placement import Placement
from trainfleet.trust.errors import BackendError
from trainfleet.watch.diagnosis import diagnose
from trainfleet.watch.lines import LogLine


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "PACE", 0.2)
    monkeypatch.setattr(barrier, "SILENCE", 1.0)
    monkeypatch.setattr(barrier, "AGAIN", 0.1)


class Nodes:
    """Nodes of one job as threads; what each said, and how its barrier ended."""

    def __init__(self, port: int, nodes: int) -> None:
        self.port, self.nodes = port, nodes
        self.said: dict[int, list[str]] = {}
        self.ended: dict[int, Exception | None] = {}
        self.threads: list[threading.Thread] = []

    def start(self, node: int, seconds: float, job: str = "runs/x") -> None:
        self.said[node] = []

        def come() -> None:
            try:
                barrier.wait_for_all(
                    Placement(node, self.nodes, "127.0.0.1", self.port),
                    job,
                    seconds,
                    self.said[node].append,
                )
                self.ended[node] = None
            except BackendError as error:
                self.ended[node] = error

        self.threads.append(threading.Thread(target=come))
        self.threads[-1].start()

    def join(self) -> dict[int, Exception | None]:
        for thread in self.threads:
            thread.join(20)
        return self.ended


def test_nodes_meet_in_whatever_order_they_come(port: int) -> None:
    nodes = Nodes(port, 4)
    for node in (2, 1):
        nodes.start(node, 10)
    time.sleep(0.4)
    nodes.start(0, 10)
    time.sleep(0.6)
    assert not nodes.ended, "node 3 is not there yet"
    nodes.start(3, 10)
    assert nodes.join() == dict.fromkeys(range(4))
    assert (
        any("3 of 4 nodes have arrived" in words for words in nodes.said[0])
        and "all 4 nodes have arrived" in nodes.said[0][-1]
    )
    assert "waiting for node 0" in nodes.said[2][0]


def test_one_that_never_comes_is_named_everywhere(port: int) -> None:
    nodes, began = Nodes(port, 4), time.monotonic()
    for node in (0, 1, 3):
        nodes.start(node, 1.0)
    ended = nodes.join()
    assert time.monotonic() - began < 5
    assert (
        all(
            isinstance(error, Missing) and "node 2 of 4 did not arrive" in error.what
            for error in ended.values()
        )
        and len(ended) == 3
    )
    assert Missing.exit_code == 69


def test_a_main_node_that_never_comes_is_named(port: int) -> None:
    nodes = Nodes(port, 2)
    nodes.start(1, 0.5)
    (error,) = nodes.join().values()
    assert (
        isinstance(error, Missing)
        and "node 0 of 2 did not arrive" in error.what
        and f"127.0.0.1:{port}" in error.why
    )


def test_a_node_that_leaves_is_not_counted(port: int) -> None:
    nodes = Nodes(port, 3)
    nodes.start(0, 1.5)
    time.sleep(0.2)
    with socket.create_connection(("127.0.0.1", port)) as early:
        early.sendall(b"runs/x 1\n")
        time.sleep(0.3)
    nodes.start(2, 5)
    ended = nodes.join()
    assert "node 1 of 3" in str(ended[0]) and "node 1 of 3" in str(ended[2])


@pytest.mark.parametrize(
    "words", [b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"runs/y 1\n", b"runs/x 9\n", b"runs/x 0\n", b"runs/x -1\n", b"\xff\xfe 1\n", b"x" * 4096]
)  # fmt: skip
def test_others_that_connect_are_no_nodes(port: int, words: bytes) -> None:
    nodes = Nodes(port, 2)
    nodes.start(0, 1.0)
    time.sleep(0.2)
    with socket.create_connection(("127.0.0.1", port)) as other:
        other.sendall(words)
        assert "node 1 of 2" in str(nodes.join()[0])


@pytest.mark.parametrize(
    "answer", [b"", b"\n", b"missing x 1\n", b"no\xff\n", b"wait x\n", b"y" * 4096]
)
def test_who_is_not_node_0_is_not_believed(port: int, answer: bytes) -> None:
    """Something else listens where node 0 should: the node goes on waiting, and says so at the end."""
    closing = threading.Event()

    def listen(server: socket.socket) -> None:
        server.settimeout(0.1)
        while not closing.is_set():
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            with connection:
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", port)) as server:
        thread = threading.Thread(target=listen, args=(server,))
        thread.start()
        nodes = Nodes(port, 2)
        nodes.start(1, 0.7)
        (error,) = nodes.join().values()
        closing.set()
        thread.join()
    assert isinstance(error, Missing)


def test_a_port_that_is_taken_is_told(port: int) -> None:
    with socket.create_server(("", port)):
        nodes = Nodes(port, 2)
        nodes.start(0, 1)
        (error,) = nodes.join().values()
    assert re.search(f"can't listen on port {port}", str(error)) and "ss -ltnp" in str(error)


def test_one_node_waits_for_nobody(port: int) -> None:
    say: Callable[[str], None] = lambda words: pytest.fail(words)  # noqa: E731
    barrier.wait_for_all(Placement(0, 1, "127.0.0.1", port), "runs/x", 0.0, say)


def test_many_are_named_by_the_first(port: int) -> None:
    with pytest.raises(Missing) as caught:
        barrier.wait_for_all(
            Placement(0, 100, "127.0.0.1", port), "runs/x", 0.2, lambda words: None
        )
    assert (
        "nodes 1, 2, 3" in caught.value.what
        and "and 83 more of 100 did not arrive" in caught.value.what
    )
    found = diagnose([LogLine(0.0, 0, None, "node", caught.value.what)])
    assert found and found.cause == "rendezvous", "a verdict knows the words of the error"
