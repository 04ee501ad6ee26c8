"""What a node of an engine does without any launcher: takes secrets, judges its own job, leaves when the others may be ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from s3server import serve
from trainfleet.node import exit_codes
from trainfleet.node.entrypoint import AGAIN
from trainfleet.node.exit_codes import ELSEWHERE, ExitCodes, code_of
from trainfleet.process.node_log import stamp
from trainfleet.run.run_folder import Run
from trainfleet.storage import s3
from trainfleet.storage.s3_sync_agent import BUCKET
from trainfleet.trust import secrets
from trainfleet.trust.errors import BackendError
from trainfleet.watch import node_verdict

ROOT = "s3://bucket/some/runs/x"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(exit_codes, "EVERY", 0.02)
    with serve(lambda application: application):
        yield


# trust/secrets.py


def test_values_take_the_place_of_references(bucket: None) -> None:
    import boto3

    boto3.client("ssm").put_parameter(Name="/trainfleet/x/KEY", Value="one", Type="SecureString")
    made = boto3.client("secretsmanager").create_secret(Name="wandb", SecretString="two")
    environment = {
        "PLAIN": "0",
        f"{secrets.PREFIX}KEY": "/trainfleet/x/KEY",
        f"{secrets.PREFIX}WANDB": made["ARN"],
    }
    secrets.take(environment)
    assert environment == {"PLAIN": "0", "KEY": "one", "WANDB": "two"}


def test_a_secret_that_can_t_be_read_is_named_with_what_the_role_needs(bucket: None) -> None:
    with pytest.raises(BackendError, match="the secret KEY can't be read") as caught:
        secrets.take({f"{secrets.PREFIX}KEY": "/trainfleet/x/ABSENT"})
    assert caught.value.where == "/trainfleet/x/ABSENT" and "ssm:GetParameter" in caught.value.next


# node/exit_codes.py


def signs(*nodes: int) -> None:
    for node in nodes:
        s3.write(f"{ROOT}/nodes/{node}", b"")


def test_the_first_node_stays_until_the_others_have_left_and_knows_how(bucket: None) -> None:
    signs(1, 2)
    first, said, found = ExitCodes(ROOT, "job-1"), list[str](), dict[int, int | None]()
    waiting = threading.Thread(target=lambda: found.update(first.collect(3, said.append)))
    waiting.start()
    ExitCodes(ROOT, "job-1").publish(1, 0, said.append)
    ExitCodes(ROOT, "job-0").publish(2, 5, said.append)  # of the attempt before
    waiting.join(0.5)
    assert waiting.is_alive() and not found
    ExitCodes(ROOT, "job-1").publish(2, 7, said.append)
    waiting.join(10)
    assert found == {1: 0, 2: 7}
    assert [one.address for one in s3.list_objects(f"{ROOT}/exits/")] == [
        f"{ROOT}/exits/job-0/2"
    ], "its own are taken away"


def test_a_node_that_is_silent_is_not_waited_for(
    bucket: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    signs(1)
    monkeypatch.setattr(exit_codes, "SILENT", -1.0)
    assert ExitCodes(ROOT, "j").collect(2, lambda words: None) == {1: None}


def test_one_that_never_came_is_given_its_time(
    bucket: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_codes, "LATE", 0.3)
    began = time.monotonic()
    assert ExitCodes(ROOT, "j").collect(2, lambda words: None) == {1: None}
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize("text", [b"", b"-1", b"7\n8", b"9999", "७".encode(), b"\xff"])
def test_what_is_no_exit_code_counts_as_a_failure(text: bytes, bucket: None) -> None:
    signs(1)
    s3.write(f"{ROOT}/exits/j/1", text)
    s3.write(f"{ROOT}/exits/j/not-a-node", b"0")
    assert ExitCodes(ROOT, "j").collect(2, lambda words: None) == {1: 1}


def test_a_bucket_that_does_not_answer_is_said_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trainfleet.trust.errors import S3Error

    def refuse(*_: Any) -> None:
        raise S3Error("gives no valid answer")

    monkeypatch.setattr(s3, "write", refuse)
    said: list[str] = []
    ExitCodes(ROOT, "j").publish(1, 0, said.append)
    assert said == ["could not report this node's exit code to node 0: gives no valid answer"]


@pytest.mark.parametrize(
    ("others", "code"),
    [
        ({}, 0),
        ({1: 0, 2: 0}, 0),
        ({1: 0, 2: 7}, ELSEWHERE),
        ({1: None}, AGAIN),
        ({1: AGAIN, 2: 0}, AGAIN),
    ],
)
def test_the_first_node_ends_as_the_job_did(others: dict[int, int | None], code: int) -> None:
    assert code_of(0, others, AGAIN) == code


# watch/node_verdict.py


def judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: dict[int, list[str]], code: int = 1
) -> int:
    """The exit code of the program for a job whose nodes have said these lines just now."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(BUCKET, "s3://bucket/some")
    monkeypatch.setattr(node_verdict, "SETTLE", 0.0)
    began = time.time() - 5
    for node, said in lines.items():
        content = b"".join(
            stamp(f"{line}\n".encode()).replace(b"agent  ", f"rank {node} ".encode(), 1)
            for line in said
        )
        s3.write(f"{ROOT}/logs/node-{node}.log/1-00000000", content)
    try:
        return node_verdict.main(["runs/x", str(len(lines)), str(code), str(began)])
    finally:
        monkeypatch.chdir(tmp_path)


def test_another_attempt_is_worth_it_where_a_machine_was_to_blame(
    bucket: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = {
        0: [
            "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
        ],
        1: ["step 3"],
    }
    (tmp_path / "runs/x").mkdir(parents=True)
    assert judged(tmp_path, monkeypatch, said) == AGAIN
    assert "failed: " in capsys.readouterr().out
    assert [event["event"] for event in Run(tmp_path / "runs/x").read_events()] == ["verdict"]


def test_none_is_where_the_program_would_do_the_same_again(
    bucket: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = [
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in <module>',
        "TypeError: unsupported operand",
    ]
    assert judged(tmp_path, monkeypatch, {0: ["step 1"], 1: trace}) == 0
    assert "(code)" in capsys.readouterr().out


def test_what_earlier_attempts_have_said_has_no_part_in_it(tmp_path: Path) -> None:
    began = time.time()
    log = tmp_path / "node-0.log"
    old, new = stamp(b"old\n", began - 100), stamp(b"new\n", began + 1)
    log.write_bytes(old + b"goes on\n" + new)
    node_verdict.cut(log, began)
    assert log.read_bytes() == new
    for time_, wanted in ((began - 60, False), (began + 1, True)):
        assert node_verdict.is_since(json.dumps({"time": time_, "event": "fault"}), began) is wanted
    assert (
        not node_verdict.is_since("{", began)
        and not node_verdict.is_since("[]", began)
        and not node_verdict.is_since('{"time": "x"}', began)
    )


def test_without_the_launcher_s_request_there_is_one_of_as_many_nodes(tmp_path: Path) -> None:
    assert node_verdict.request_of(tmp_path, 3).job.nodes == 3
