"""An instance's metadata service, on loopback or where it is told to: it tells of a spot notice only to who has asked it for a token (IMDSv2)."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ACTION = "/latest/meta-data/spot/instance-action"


class Service(ThreadingHTTPServer):
    """IMDSv2; `notice` is what it says of the instance."""

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, Answer)
        self.notice = ""
        self.only = ""  # the address to which it is told; "": to all
        self.tokens: list[str] = []
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        life = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.path != "/latest/api/token" or not life.isdigit():
            return self.answer(400)
        self.server.tokens.append(f"token-{len(self.server.tokens)}")
        self.answer(200, self.server.tokens[-1])

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.headers.get("X-aws-ec2-metadata-token") not in self.server.tokens:
            return self.answer(401)
        heard = self.server.only in ("", self.client_address[0])
        self.answer(
            200, self.server.notice
        ) if self.path == ACTION and self.server.notice and heard else self.answer(404)

    def answer(self, code: int, text: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...
