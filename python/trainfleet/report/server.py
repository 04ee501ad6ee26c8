"""Serves a run's report to this machine's browser: one page, read anew at each request, and nothing else of any folder.

Only the loopback interface listens, and only requests that name it are answered: a page elsewhere that has its own name lead here
(DNS rebinding) reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ..seat import LOOPBACK

PORT = 8642
NAMES = (LOOPBACK, "localhost")


class Server(ThreadingHTTPServer):
    """`page` gives the bytes to answer with."""

    daemon_threads = True

    def __init__(self, page: Callable[[], bytes], port: int = PORT) -> None:
        self.page = page
        try:
            super().__init__((LOOPBACK, port), Answer)
        except OSError:  # it is in use: any other does
            super().__init__((LOOPBACK, 0), Answer)

    @property
    def link(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in NAMES or self.path != "/":
            self.send_error(404)
            return
        page = self.server.page()
        self.send_response(200)
        for name, value in (("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(page))),
                            ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *words: object) -> None:
        """Nothing: the terminal is the user's."""
