"""Serves a page to this machine's browser: a run's report, or the page of all runs with its data.
Content is reread for each request.

The server listens only on the loopback interface and rejects requests without a loopback Host
header, so that a page from another host can't read the report through DNS rebinding. Because other
users of the machine can also reach the loopback interface, a request must contain the token from
the printed URL. The response sets a cookie, so that later requests work without the token in the
URL.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from ..node.placement import LOOPBACK
from ..trust.errors import TrainfleetError
from ..trust.safe_output import shown

PORT = 8642
HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE)
MOST = 16  # maximum open connections; a new one closes the oldest
FIELDS = 32  # maximum number of query fields; the page names up to 14 runs
HTML = "text/html"
# A report may come from elsewhere, so it must not run scripts here.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
Query = Mapping[str, Sequence[str]]
Routes = Mapping[str, Callable[[Query], tuple[str, bytes]]]
LONGEST = 30.0  # maximum seconds per connection; sending a page takes milliseconds
TOKEN = "token"
ASKS = (
    "Open this page with the full address that <code>make watch</code> printed; it ends "
    "in <code>/?token=…</code>"
)
ABSENT = "The report is missing at the moment; reload, or run <code>make report</code>"


class Server(ThreadingHTTPServer):
    """HTTP server for a page. `page` returns the bytes of the page, and `routes` has a handler for
    each other path. A handler gets the parsed query, and returns the media type and the content.
    """

    daemon_threads = True
    # Maximum number of connections waiting to be accepted. The kernel delays connections beyond it
    # by a second.
    request_queue_size = 128

    def __init__(
        self, page: Callable[[], bytes], port: int | None = None, routes: Routes | None = None
    ) -> None:
        """Listens on `port`. Defaults to PORT, or to any free port if PORT is in use. Raises
        OSError if the given port is in use.
        """
        self.token = secrets.token_urlsafe(18)
        self.routes: Routes = {"/": lambda _: (HTML, page()), **(routes or {})}
        self.begun = dict[socket.socket, float]()  # start times of open connections, oldest first
        try:
            super().__init__((LOOPBACK, PORT if port is None else port), Answer)
        except OSError:
            if port:
                raise
            super().__init__((LOOPBACK, 0), Answer)

    @property
    def link(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/?{TOKEN}={self.token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handles the request in one of up to MOST threads. If all threads are busy, closes the
        oldest connection first.
        """
        while len(self.begun) >= MOST:
            for oldest in list(self.begun)[:1]:
                _end(oldest)
            time.sleep(0.001)  # wait until its thread exits
        self.begun[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.begun.pop(request, None)

    def service_actions(self) -> None:
        """Closes connections that exceed LONGEST seconds, even if they still send bytes."""
        for request, began in list(self.begun.items()):
            if time.monotonic() - began > LONGEST:
                _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints one line for an internal error, or nothing if the browser disconnected. Tracebacks
        would flood the user's terminal.
        """
        if not isinstance(error := sys.exception(), OSError):
            print(f"a request failed: {shown(repr(error))}", file=sys.stderr, flush=True)


def _end(request: socket.socket) -> None:
    """Wakes a connection's reader thread, which then closes the connection."""
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:  # the connection was already closed
        pass


class Answer(BaseHTTPRequestHandler):
    server: Server
    timeout = LONGEST  # maximum seconds between two bytes

    def do_GET(self) -> None:
        (path, _, words), hosts = self.path.partition("?"), self.headers.get_all("Host", [])
        query = parse_qs(words, max_num_fields=FIELDS, errors="surrogateescape")
        route = self.server.routes.get(path)
        if len(hosts) != 1 or not HOST.fullmatch(hosts[0]) or route is None:
            self.send_error(404)
        elif not self._is_known(query.get(TOKEN, [""])[0]):
            self._send(403, HTML, _note(ASKS))
        else:
            try:
                self._send(200, *route(query))
            except (FileNotFoundError, TrainfleetError):
                self._send(503, HTML, _note(ABSENT))

    def _is_known(self, token: str) -> bool:
        """Returns whether the request contains the token in its URL or cookie."""
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie)
        except CookieError:
            cookie = None
        given = (token, cookie.value if cookie else "")
        return any(
            hmac.compare_digest(one.encode(errors="replace"), self.server.token.encode())
            for one in given
        )

    @property
    def _cookie(self) -> str:
        """Returns the cookie's name, which contains the port because browsers share cookies between
        ports and a user may watch several runs.
        """
        return f"trainfleet-{self.server.server_port}"

    def _send(self, code: int, kind: str, page: bytes) -> None:
        self.send_response(code)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(page))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        if self.path.partition("?")[0] != "/":  # the page at / contains its own policy
            self.send_header("Content-Security-Policy", POLICY)
        if code == 200:
            self.send_header(
                "Set-Cookie",
                f"{self._cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict",
            )
        self.end_headers()
        self.wfile.write(page)

    def version_string(self) -> str:
        return "trainfleet"

    def log_message(self, format: str, *words: object) -> None:
        """Discards log messages, to keep the user's terminal clean."""


def _note(words: str) -> bytes:
    return f"<!DOCTYPE html><title>trainfleet</title><p>{words}</p>\n".encode()
