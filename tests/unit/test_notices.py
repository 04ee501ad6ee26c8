"""A spot notice, from a real server that answers as an instance's metadata service does: only to who has a token of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from metadata import ACTION, Service
from trainfleet.engine import vote


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    service = Service()
    monkeypatch.setenv(
        "AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{service.server_port}/"
    )
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which must not be asked
    monkeypatch.setattr(vote, "EVERY", 0.01)
    yield service
    service.shutdown()
    service.server_close()


def test_no_notice_is_a_404_and_a_notice_says_what_and_when(service: Service) -> None:
    assert vote.look() == ""
    service.notice = '{"action": "terminate", "time": "2026-11-20T08:22:00Z"}'
    assert vote.look() == "terminate at 2026-11-20T08:22:00Z" and service.asked == [
        ACTION,
        ACTION,
    ]


@pytest.mark.parametrize("text", ["something else", "[1]", "{}"])
def test_a_notice_in_another_form_is_a_notice(service: Service, text: str) -> None:
    service.notice = text
    assert vote.look() == text


def test_the_watch_looks_until_there_is_one(service: Service) -> None:
    heard = list[str]()
    watch = vote.NoticePoller(heard.append)
    while len(service.asked) < 3:
        assert watch.is_alive() and not heard
    service.notice = '{"action": "stop", "time": "2026-11-20T08:22:00Z"}'
    watch.join(10)
    assert heard == ["stop at 2026-11-20T08:22:00Z"]


def test_a_service_that_is_not_there_is_told_once_and_asked_again(service: Service, monkeypatch: pytest.MonkeyPatch,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    here = vote.service()
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    watch, looks = vote.NoticePoller(lambda notice: None), threading.Event()
    while (
        not watch.trouble
    ):  # what it says meanwhile could be lost: reading empties the buffer after a look at it
        looks.wait(0.01)
    told = capsys.readouterr().out
    assert "can't read spot notices from http://127.0.0.1:9" in told and "fleet.spot" in told
    looks.wait(0.1)
    assert capsys.readouterr().out == "" and watch.is_alive()
    service.notice = "{}"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", here)
    watch.join(10)
    assert not watch.is_alive()
