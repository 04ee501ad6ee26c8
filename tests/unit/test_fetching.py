"""Sources in S3 are parsed by a process that has no network; another fetches their bytes, and only those."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from s3server import serve
from takeover import ATTEMPT
from trainfleet.config import Settings, dump_resolved, load
from trainfleet.config.types import Data
from trainfleet.data import fetching
from trainfleet.data import source_survey as looking
from trainfleet.host import sandbox
from trainfleet.storage import s3, s3_streams
from trainfleet.trust.errors import DataError, S3Error

WHOLE = not sandbox.lacks()
LINES = "".join(json.dumps({"text": f"document {number} " * 30}) + "\n" for number in range(400)).encode()

# A library that is loaded behind the wall and has been taken over, as it were, by a crafted file.
TAKEN = (
    ATTEMPT
    + """
import json
from trainfleet.data import fetching
class Tokenizer:
    @staticmethod
    def from_json_str(definition):
        attempt("socket", lambda: socket.create_connection(("127.0.0.1", int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]))))
        attempt("secret", lambda: Path("secret.txt").read_text())
        attempt("another object", lambda: fetching.stat("s3://bucket/textual/secret.jsonl"))
        attempt("a source", lambda: fetching.stat("s3://bucket/text/0.jsonl"))
        raise ValueError("taken over")
"""
)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bucket with three files of text, and one beside their prefix."""
    monkeypatch.chdir(tmp_path)
    with serve(lambda application: application):
        for number in range(3):
            s3.write(f"s3://bucket/text/{number}.jsonl", LINES)
        s3.write("s3://bucket/textual/secret.jsonl", b'{"text": "a secret"}\n')
        yield


@pytest.fixture
def fetcher(bucket: None) -> Iterator[None]:
    """This process asks one that fetches, and S3 not at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "_fetcher", None)
        fetching.start(["s3://bucket/text"])
        patch.setattr(s3, "client", lambda: pytest.fail("this process asks S3 itself"))
        yield
        assert fetching._fetcher
        fetching._fetcher.connection.close()


def config() -> None:
    text = "name: x\ndata: {name: set, sources: ['s3://bucket/text'], tokenizer: bpe, vocabulary_size: 300}\ntrain: {steps: 2}\n"
    Path("config.yaml").write_text(text)
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.yaml").write_text(dump_resolved(load(Settings(Path("config.yaml")))[0]))


@pytest.mark.skipif(not WHOLE and "REQUIRE_ALL" not in os.environ, reason="this kernel has no Landlock")
@pytest.mark.parametrize("workers", [1, 2])
def test_what_parses_a_source_in_s3_has_no_network(bucket: None, workers: int) -> None:
    config()
    Path("library").mkdir()
    Path("library/fastokens.py").write_text(TAKEN)
    Path("secret.txt").write_text("a secret")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["library", *sys.path]), "WORKERS": str(workers)}
    words = [sys.executable, "-m", "trainfleet.data", "runs/x/config.yaml"]
    environment["PYTHONPATH"] = os.pathsep.join([str(Path("library").absolute()), *sys.path])
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0 and "finished:" in done.stdout, done.stdout + done.stderr
    said = {line for line in done.stdout.splitlines() if line.startswith(("DONE", "REFUSED"))}
    assert said == {"REFUSED socket", "REFUSED secret", "REFUSED another object", "DONE a source"}


@pytest.mark.skipif(not WHOLE and "REQUIRE_ALL" not in os.environ, reason="this kernel has no Landlock")
def test_plan_looks_at_a_source_in_s3_without_a_network(bucket: None, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data("set", ("s3://bucket/text",), "text", "bpe", 300, 0.1)
    found = looking.look(data)
    assert found.files == 3 and found.bytes == 3 * len(LINES)
    with pytest.raises(S3Error, match="no such bucket"):
        looking.look(replace(data, sources=("s3://none/text",)))
    port = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
    monkeypatch.setattr(looking, "require_use", lambda _: socket.create_connection(("127.0.0.1", port)))
    with pytest.raises(DataError, match="ended its reader"):
        looking.look(data)


def test_a_fetcher_brings_listings_sizes_and_ranges(fetcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_streams, "RANGE", 2**14)
    listed = fetching.list_objects("s3://bucket/text")
    assert [found.address for found in listed if "/text/" in found.address] == [f"s3://bucket/text/{n}.jsonl" for n in range(3)]
    assert fetching.stat("s3://bucket/text/9.jsonl") is None
    found = fetching.stat("s3://bucket/text/1.jsonl")
    assert found and found.size == len(LINES)
    with fetching.open_object(found, 0) as stream, fetching.open_object(found, 70_000) as later:
        assert later.read() == LINES[70_000:] and stream.read() == LINES
    with pytest.raises(S3Error, match="refuses"):
        fetching.open_object(s3.Object(found.address, found.size, '"other"'), 0).read()


def test_a_fetcher_reads_the_credentials_that_a_variable_names(
    bucket: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("[default]\naws_access_key_id = testing\naws_secret_access_key = testing\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(fetching, "_fetcher", None)
    fetching.start(["s3://bucket/text"])
    assert fetching._fetcher and fetching.stat("s3://bucket/text/0.jsonl")
    fetching._fetcher.connection.close()


@pytest.mark.parametrize(
    "address", ["s3://bucket/textual/secret.jsonl", "s3://bucket/tex", "s3://other/text", "file:///etc/passwd"]
)
def test_a_fetcher_brings_nothing_else(fetcher: None, address: str) -> None:
    for ask in (fetching.list_objects, fetching.stat):
        with pytest.raises(S3Error, match="below no source"):
            ask(address)
    with pytest.raises(S3Error, match="below no source"):
        fetching.open_object(s3.Object(address, 10, ""), 0).read()


@pytest.mark.parametrize(
    "question", [b"{", b"4", b'["range", "s3://bucket/text/0.jsonl", "a", 4, ""]', b'["list", 4]', b"[]", b"x" * 2**21]
)
def test_a_question_that_is_none_ends_the_fetcher_and_the_reader_is_told(fetcher: None, question: bytes) -> None:
    assert fetching._fetcher
    with suppress(BrokenPipeError):  # of a long one
        fetching._fetcher.connection.send_bytes(question)
    with pytest.raises(S3Error, match="the process that fetches has ended"):
        fetching.stat("s3://bucket/text/0.jsonl")


def test_another_process_gets_a_connection_of_its_own(fetcher: None) -> None:
    first, second = fetching.another(), fetching.another()
    assert first and second
    first.send_bytes(b"nonsense")  # which ends that one alone
    with pytest.raises(EOFError):
        first.recv_bytes()
    assert s3.Object(*fetching.Fetcher(second).ask("stat", "s3://bucket/text/0.jsonl")).size == len(LINES)
    assert fetching.stat("s3://bucket/text/0.jsonl")
    first.close()
    second.close()
