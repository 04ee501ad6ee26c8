"""The page of make watch, asked over real sockets: by its reader, by other users of the machine, and by whoever means it harm."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainfleet.cli import main as command
from trainfleet.cli.runs import served as served_on
from trainfleet.report import server
from trainfleet.report.server import MOST, Server
from unit.report_runs import make_run

PAGE = b"<p>the report"


def served(page: Callable[[], bytes] = lambda: PAGE) -> Server:
    made = Server(page, 0)
    threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
    return made


@pytest.fixture
def page() -> Iterator[Server]:
    made = served()
    yield made
    made.shutdown()
    made.server_close()


def ask(
    page: Server, path: str = "/", **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    link = http.client.HTTPConnection("127.0.0.1", page.server_port, timeout=5)
    link.request("GET", path, headers={"Host": f"127.0.0.1:{page.server_port}", **headers})
    answer = link.getresponse()
    return answer.status, answer.read(), answer.headers


def path_of(page: Server) -> str:
    return page.link.partition(str(page.server_port))[2]


def test_the_page_is_shown_to_who_has_the_token_and_then_to_their_browser(page: Server) -> None:
    assert page.server_address[0] == "127.0.0.1" and re.fullmatch(
        r"/\?token=[\w-]{24}", path_of(page)
    )
    code, text, headers = ask(page, path_of(page))
    cookie = headers["Set-Cookie"]
    assert (code, text) == (200, PAGE) and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert ask(page, "/", Cookie=f"other=1; {cookie.partition(';')[0]}")[:2] == (200, PAGE)


@pytest.mark.parametrize(
    ("path", "cookie"),
    [("/", ""), ("/?token=", ""), ("/?token=%C3%A9%00", ""), ("/", "{}=x"), ("/", "=;;\x01")],
)
def test_without_the_token_nobody_reads_it_and_is_told_what_to_do(
    page: Server, path: str, cookie: str
) -> None:
    code, text, headers = ask(
        page, path, Cookie=cookie.replace("{}", f"trainfleet-{page.server_port}")
    )
    assert (
        code == 403 and PAGE not in text and b"make watch" in text and "Set-Cookie" not in headers
    )


@pytest.mark.parametrize(
    "host", ["evil.example:80", "localhost.evil.example", "[::1]:80", "127.0.0.1:80:80", ""]
)
def test_a_page_that_has_its_name_lead_here_reads_nothing(page: Server, host: str) -> None:
    assert ask(page, path_of(page), Host=host)[0] == 404


@pytest.mark.parametrize("host", ["LocalHost:8000", "LOCALHOST", "127.0.0.1"])
def test_this_machine_has_its_names_in_any_case(page: Server, host: str) -> None:
    assert ask(page, path_of(page), Host=host)[:2] == (200, PAGE)


@pytest.mark.parametrize(
    "path", ["/config.yaml", "/../config.yaml", "/%2e%2e/config.yaml", "//[", "http://127.0.0.1/"]
)
def test_there_is_one_page(page: Server, path: str) -> None:
    assert ask(page, path + path_of(page)[1:])[0] == 404


def test_a_report_that_is_not_there_is_said_in_the_page_and_not_on_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = served((tmp_path / "report.html").read_bytes)
    code, text, _ = ask(page, path_of(page))
    page.shutdown()
    assert code == 503 and b"make report" in text and "".join(capfd.readouterr()) == ""


def test_a_fault_of_the_page_is_one_line_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    page = served(lambda: PAGE[:0] + bytes([256]))
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(page, path_of(page))
    page.shutdown()
    said = "".join(capfd.readouterr())
    assert said.startswith("a request failed: ValueError") and said.count("\n") == 1


def test_who_hangs_up_or_stays_silent_costs_neither_threads_nor_words(
    page: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    before, idle = threading.active_count(), []
    for _ in range(5):
        gone = socket.create_connection(("127.0.0.1", page.server_port))
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        gone.close()
    for _ in range(100):
        idle.append(socket.create_connection(("127.0.0.1", page.server_port)))
    assert ask(page, path_of(page))[:2] == (200, PAGE)
    assert threading.active_count() - before <= MOST
    assert "".join(capfd.readouterr()) == ""
    for link in idle:
        link.close()


def test_who_drips_is_ended_in_time(monkeypatch: pytest.MonkeyPatch, page: Server) -> None:
    monkeypatch.setattr(server, "LONGEST", 0.3)
    with socket.create_connection(("127.0.0.1", page.server_port), 5) as link:
        try:
            for _ in range(100):
                link.sendall(b"G")
                time.sleep(0.05)
        except OSError:
            return
    pytest.fail("it could drip for five seconds")


@pytest.mark.timeout(60)
def test_a_port_that_was_asked_for_is_that_one_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one, any that is free does."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("name: first-run\n")
    run = make_run(tmp_path / "runs")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command(["watch", f"PORT={port}"]) == 2
        told = capsys.readouterr().err
        assert (
            told.startswith(f"error: PORT: {port} can't be used: Address already in use\n")
            and "next: set another PORT" in told
        )
        monkeypatch.setattr(server, "PORT", port)
        with Server(lambda: PAGE) as other:
            assert other.server_port != port
    with served_on(run, port) as asked:
        assert asked.server_port == port
