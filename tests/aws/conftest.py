"""The pretended account, with others' things in it, in place of AWS for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aws.account import Account
from aws.world import aws, strangers
from trainfleet.backends import backend_of


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    monkeypatch.chdir(tmp_path)
    backend_of.cache_clear()
    found = Account()
    strangers(found)
    with aws(found):
        yield found
    backend_of.cache_clear()
