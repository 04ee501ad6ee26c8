"""A registry of images on loopback, as far as a push needs one, that refuses what a test wants it to in ECR's words.

https://distribution.github.io/distribution/spec/api/ - a layer is uploaded before the manifest that names it.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

USER, TOKEN = "AWS", "canary-token-55"
DENIED = "User: arn:aws:iam::1:user/x is not authorized to perform: ecr:InitiateLayerUpload on resource: trainfleet"
TAKEN = "The image tag 'x' already exists in the 'trainfleet' repository and cannot be overwritten because the tag is immutable."


class Registry(http.server.ThreadingHTTPServer):
    """What it holds, and what it refuses: (method, pattern of the path) → (status, code, message)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.host = f"127.0.0.1:{self.server_port}"
        self.blobs = dict[str, bytes]()
        self.manifests = dict[str, bytes]()
        self.uploads = dict[str, bytes]()
        self.refuses = dict[tuple[str, str], tuple[int, str, str]]()


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        if digest := re.fullmatch(r"/signed/(.+)", self.path):  # as ECR signs an address of a blob
            return self.say(200, self.server.blobs[digest[1]])
        known = base64.b64encode(f"{USER}:{TOKEN}".encode()).decode()
        body = self.body()
        if self.headers.get("Authorization") != f"Basic {known}":
            return self.say(401, **{"WWW-Authenticate": 'Basic realm="here"'})
        for (method, path), (status, code, message) in self.server.refuses.items():
            if method == self.command and re.search(path, self.path):
                return self.say(
                    status, json.dumps({"errors": [{"code": code, "message": message}]}).encode()
                )
        self.answer(urlsplit(self.path).path, body)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_GET

    def answer(self, path: str, body: bytes) -> None:
        name, store = path.rpartition("/")[2], self.server
        if self.command == "POST":
            upload = f"{path}{len(store.uploads)}"
            store.uploads[upload] = b""
            self.say(202, Location=upload)
        elif self.command == "PATCH":
            store.uploads[path] += body
            self.say(202, Location=path)
        elif self.command == "PUT" and "/uploads/" in path:
            content = store.uploads.pop(path) + body
            (digest,) = parse_qs(urlsplit(self.path).query)["digest"]
            assert digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
            store.blobs[digest] = content
            self.say(201, **{"Docker-Content-Digest": digest})
        elif self.command == "PUT":
            store.manifests[name] = body
            self.say(201, **{"Docker-Content-Digest": f"sha256:{hashlib.sha256(body).hexdigest()}"})
        else:
            found = store.blobs.get(name) or store.manifests.get(name)
            self.say(200 if path == "/v2/" or found else 404, found or b"")

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def say(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving() -> Iterator[Registry]:
    with Registry() as registry:
        threading.Thread(target=registry.serve_forever, daemon=True).start()
        yield registry
        registry.shutdown()
