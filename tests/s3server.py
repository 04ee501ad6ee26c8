"""A local S3 for tests: moto's server, wrapped in whatever faults a test orders, and boto3 pointed at it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from requirement import need
from trainfleet.storage import s3

need("boto3")
need("moto.server", "pip install moto[server,s3]")
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}
BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@contextmanager
def serve(wrap: Callable[[Application], Application], *, host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a server with an empty bucket called `bucket`; this process's boto3 speaks to it, and retries quickly."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log_request(self, *_: object) -> None: ...

    application = wrap(DomainDispatcherApplication(create_backend_app))
    serving = make_server(host, 0, application, threaded=True, request_handler=Quiet)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://{host}:{serving.port}"}
        ).items():
            patch.setenv(name, value)
        patch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
        s3._client.cache_clear()
        need("moto").backends.get_backend("s3")["123456789012"][
            "aws"
        ].reset()  # it outlives its server
        s3.client().create_bucket(Bucket="bucket")
        yield f"http://{host}:{serving.port}"
    s3._client.cache_clear()
    serving.shutdown()


def busy(start: Callable[..., Any]) -> Iterable[bytes]:
    """Answers as S3 does while it splits a prefix."""
    start(
        "503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(BUSY)))]
    )
    return [BUSY]
