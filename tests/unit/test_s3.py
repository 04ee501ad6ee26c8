"""The entry to S3: what is cut off is read again, what can't be had is one error with its cause and remedy, forks don't share."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from s3server import Application, serve
from trainfleet.storage import s3
from trainfleet.trust.errors import S3Error

ADDRESS = "s3://bucket/a b/ü.txt"


class Cut:
    """The server's application, which ends the next `cuts` bodies of an object in their middle."""

    def __init__(self, application: Application) -> None:
        self.application, self.cuts = application, 0

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        answer = self.application(environment, start)
        if environment["REQUEST_METHOD"] != "GET" or not self.cuts:
            return answer
        self.cuts -= 1
        content = b"".join(answer)
        return [content[: len(content) // 2]]


@pytest.fixture
def server() -> Iterator[Cut]:
    made: list[Cut] = []

    def wrap(application: Application) -> Application:
        made.append(Cut(application))
        return made[0]

    with serve(wrap):
        yield made[0]


def test_a_body_that_is_cut_off_is_read_again(server: Cut) -> None:
    s3.write(ADDRESS, content := bytes(range(256)) * 100)
    server.cuts = 3
    assert s3.read(ADDRESS) == content and server.cuts == 0
    server.cuts = 3
    assert s3.read_range(ADDRESS, 1000, 20_000) == content[1000:20_000]
    server.cuts = 100
    with pytest.raises(S3Error, match="sent no valid response") as caught:
        s3.read(ADDRESS)
    assert (
        "ü.txt" in caught.value.where and caught.value.next == "aws s3 ls 's3://bucket/a b/ü.txt'"
    )


def test_an_object_that_is_larger_than_its_reader_allows_is_refused(server: Cut) -> None:
    s3.write(ADDRESS, bytes(1001))
    with pytest.raises(S3Error, match="S3 sent an invalid response"):
        s3.read(ADDRESS, 1000)


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nETag: x\r\n\r\nhalf"],
    ids=["nothing", "half"],
)
def test_an_endpoint_that_takes_requests_and_answers_none_is_told_after_three_tries(
    server: Cut, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    tried, kept = [], []
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(
                        silent.accept()[0]
                    )  # a connection that is dropped would be an answer
                    tried.append(kept[-1].recv(2**16))
                    kept[-1].sendall(answer)

        threading.Thread(target=take, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(s3, "ANSWER", 0.2)
        s3._client.cache_clear()
        with pytest.raises(S3Error, match="sent no valid response") as caught:
            s3.read(ADDRESS)
    assert (
        len(tried) == s3.SILENCES
        and "timeout" in caught.value.why
        and "3 times" in caught.value.why
    )


def test_the_error_is_what_a_disk_would_raise_and_comes_whole_through_a_process_boundary(
    server: Cut,
) -> None:
    with pytest.raises(OSError, match="the bucket does not exist") as caught:
        s3.write("s3://elsewhere/a", b"")
    assert (
        isinstance(caught.value, S3Error)
        and caught.value.errno == errno.EIO
        and caught.value.filename == "s3://elsewhere/a"
    )
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.errno == errno.EIO


@pytest.mark.parametrize(
    "name, value, why",
    [("AWS_ENDPOINT_URL", "not a url", "Invalid endpoint"), ("AWS_PROFILE", "nobody", "could not be found"),
     ("AWS_MAX_ATTEMPTS", "many", "many")],
)  # fmt: skip
def test_settings_of_aws_that_are_none_are_named(
    server: Cut, monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    monkeypatch.setenv(name, value)
    s3._client.cache_clear()
    with pytest.raises(S3Error, match="can't create a client") as caught:
        s3.read(ADDRESS)
    assert why in caught.value.why


def test_without_credentials_it_says_how_to_give_some(
    server: Cut, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3._client.cache_clear()
    with pytest.raises(S3Error, match="S3 needs credentials") as caught:
        s3.read(ADDRESS)
    assert "AWS_PROFILE" in caught.value.next


def test_a_fork_has_a_client_of_its_own(server: Cut) -> None:
    s3.write(ADDRESS, b"parent")
    mine = s3.client()
    if (pid := os.fork()) == 0:
        os._exit(0 if s3.client() is not mine and s3.read(ADDRESS) == b"parent" else 1)
    assert os.waitpid(pid, 0)[1] == 0 and s3.client() is mine


def test_boto3_is_loaded_by_the_first_request_alone() -> None:
    code = "import sys, trainfleet.storage.s3, trainfleet.checkpoints.store, trainfleet.data.dataset_store; sys.exit('boto3' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": "python"}, check=False
        ).returncode
        == 0
    )
