"""Package indexes on the loopback: what recorded_indexes.yaml has of them, served in the forms that they answer in.

with served() as indexes:      hosts/platform.py then asks here, whatever address it has
    indexes.rows.remove(row)   one file or version is gone
    indexes.instead["pip.repos.neuron.amazonaws.com"] = page      what all its pages are: a proxy's
    indexes.asked              the pages that were asked for
    indexes.stubs = True       wheels can be downloaded: empty packages that ask for what the real ones do; sums are theirs

What the usual index has beside the recorded pages are stubs too.
"""

from __future__ import annotations

import functools
import hashlib
import io
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote, unquote
from urllib.request import Request, urlopen

import yaml

RECORDED: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "recorded_indexes.yaml").read_text()
)
STUBS = {
    "islpy": "2023.2.5",
    "ec2-metadata": "2.17.0",
}  # of the usual index, where its newest would not do
Row = tuple[str, str, str]  # a page, what it has, and its SHA-256 or version


def rows() -> list[Row]:
    """All that the indexes have, a row each."""
    found = [
        (page["page"], name, sum_)
        for page in RECORDED["pip"]
        for name, sum_ in page["files"].items()
    ]
    found += [
        (page["page"], name, version)
        for page in RECORDED["apt"]
        for name, all_ in page["packages"].items()
        for version in all_
    ]
    return found + [
        (page["page"], "", "") for kind in ("files", "manifests") for page in RECORDED[kind]
    ]


@functools.cache
def stub(name: str) -> bytes:
    """A wheel of this name, empty but for what the real one asks for."""
    package, version = name.split("-")[:2]
    known = (
        RECORDED["metadata"]
        .get(f"{package.replace('_', '-')} {version.partition('+')[0]}", {})
        .get("requires", ())
    )
    info, content = f"{package}-{version}.dist-info", io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for file, text in {
            "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
            + "".join(f"Requires-Dist: {ask}\n" for ask in known),
            "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "".join(f"{info}/{part},,\n" for part in ("METADATA", "WHEEL", "RECORD")),
        }.items():
            archive.writestr(zipfile.ZipInfo(f"{info}/{file}"), text)
    return content.getvalue()


class Indexes:
    def __init__(self) -> None:
        self.rows, self.instead, self.asked = rows(), dict[str, str](), list[str]()
        self.silent = self.stubs = False
        self.address = ""

    def at(self, page: str) -> str:
        """Where a page is served."""
        return f"{self.address}/{page.removeprefix('https://')}"

    def sum_of(self, name: str, sum_: str) -> str:
        """The SHA-256 that a page has of a file."""
        return hashlib.sha256(stub(name)).hexdigest() if self.stubs and sum_ else sum_

    def answer(self, page: str, leave: str) -> tuple[int, str, str | bytes]:
        """Code, type and text of an answer."""
        host = page.split("/")[2]
        mine = [
            row
            for row in self.rows
            if row[0] == (page.removeprefix("https://") if host == "usual" else page)
        ]
        if self.stubs and page.endswith(".whl"):
            return 200, "application/zip", stub(unquote(page.rpartition("/")[2]))
        if self.stubs and host == "usual" and not mine:
            name = page.split("/")[3]
            mine = [
                (page, f"{name.replace('-', '_')}-{STUBS.get(name, '99.0')}-py3-none-any.whl", "")
            ]
        if host in self.instead:
            return 200, "text/html", self.instead[host]
        if page.startswith(
            "https://auth.docker.io/token?service=registry.docker.io&scope=repository:library/ubuntu:pull"
        ):
            return 200, "application/json", '{"token": "of-nobody"}'
        if "/manifests/" in page and leave != "Bearer of-nobody":
            return 401, "application/json", "{}"
        if not mine:
            return (
                (403 if host.startswith("efa") else 404),
                "application/xml",
                "",
            )  # a bucket that nobody may list says 403
        if page.endswith("/Packages"):
            stanza = "Package: {}\nArchitecture: amd64\nVersion: {}\nMaintainer: AWS\nDescription: a package\n with more lines\n"
            return (
                200,
                "text/plain",
                "\n".join(stanza.format(name, version) for _, name, version in mine),
            )
        if page.endswith("/"):
            lines = (
                f'<a href="../{quote(name)}{sum_ and f"#sha256={self.sum_of(name, sum_)}"}">{name}</a><br>'
                for _, name, sum_ in mine
            )
            return (
                200,
                "text/html",
                "<!DOCTYPE html>\n<html><body>\n" + "\n".join(lines) + "\n</body></html>\n",
            )
        return (
            200,
            "application/vnd.oci.image.index.v1+json"
            if "/manifests/" in page
            else "application/gzip",
            "",
        )


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
                content = text.encode() if isinstance(text, str) else text
                self.wfile.write(content if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, *words: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # all pages are asked for at once

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    indexes.address = f"http://127.0.0.1:{server.server_port}"

    def opened(request: Request, timeout: float) -> Any:
        request.full_url = indexes.at(request.full_url)
        return urlopen(request, timeout=timeout)

    try:
        with mock.patch("urllib.request.urlopen", opened):
            yield indexes
    finally:
        server.shutdown()
        server.server_close()
