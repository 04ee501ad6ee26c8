"""Package indexes on the loopback: what recorded_indexes.yaml has of them, served in the forms that they answer in.

with served() as indexes:      nodes/pins.py then asks here, whatever address it has
    indexes.rows.remove(row)   one file or version is gone
    indexes.instead["pip.repos.neuron.amazonaws.com"] = page      what all its pages are: a proxy's
    indexes.asked              the pages that were asked for
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote
from urllib.request import Request, urlopen

import yaml

from trainfleet.nodes import pins

RECORDED: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "recorded_indexes.yaml").read_text())
Row = tuple[str, str, str]  # a page, what it has, and its SHA-256 or version


def rows() -> list[Row]:
    """All that the indexes have, a row each."""
    found = [(page["page"], name, sum_) for page in RECORDED["pip"] for name, sum_ in page["files"].items()]
    found += [
        (page["page"], name, version) for page in RECORDED["apt"] for name, all_ in page["packages"].items() for version in all_
    ]
    return found + [(page["page"], "", "") for kind in ("files", "manifests") for page in RECORDED[kind]]


class Indexes:
    def __init__(self) -> None:
        self.rows, self.instead, self.asked = rows(), dict[str, str](), list[str]()
        self.silent = False

    def answer(self, page: str, leave: str) -> tuple[int, str, str]:
        """Code, type and text of an answer."""
        host = page.split("/")[2]
        mine = [row for row in self.rows if row[0] == page]
        if host in self.instead:
            return 200, "text/html", self.instead[host]
        if page.startswith("https://auth.docker.io/token?service=registry.docker.io&scope=repository:library/ubuntu:pull"):
            return 200, "application/json", '{"token": "of-nobody"}'
        if "/manifests/" in page and leave != "Bearer of-nobody":
            return 401, "application/json", "{}"
        if not mine:
            return (403 if host.startswith("efa") else 404), "application/xml", ""  # a bucket that nobody may list says 403
        if page.endswith("/Packages"):
            stanza = "Package: {}\nArchitecture: amd64\nVersion: {}\nMaintainer: AWS\nDescription: a package\n with more lines\n"
            return 200, "text/plain", "\n".join(stanza.format(name, version) for _, name, version in mine)
        if page.endswith("/"):
            lines = (f'<a href="../{quote(name)}{sum_ and f"#sha256={sum_}"}">{name}</a><br>' for _, name, sum_ in mine)
            return 200, "text/html", "<!DOCTYPE html>\n<html><body>\n" + "\n".join(lines) + "\n</body></html>\n"
        return 200, "application/vnd.oci.image.index.v1+json" if "/manifests/" in page else "application/gzip", ""


@contextmanager
def served() -> Iterator[Indexes]:
    indexes = Indexes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = f"https:/{self.path}"
            indexes.asked.append(page)
            if indexes.silent:
                time.sleep(1.0)
            code, kind, text = indexes.answer(page, self.headers.get("Authorization", ""))
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("x-amz-request-id", "0")
            self.end_headers()
            with suppress(BrokenPipeError):  # nobody waits any more
                self.wfile.write(text.encode() if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, *words: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # all pages are asked for at once

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def opened(asked: str | Request, timeout: float) -> Any:
        request = asked if isinstance(asked, Request) else Request(asked)
        request.full_url = f"http://127.0.0.1:{server.server_port}/{request.full_url.removeprefix('https://')}"
        return urlopen(request, timeout=timeout)

    try:
        with mock.patch.object(pins, "urlopen", opened):
            yield indexes
    finally:
        server.shutdown()
        server.server_close()
