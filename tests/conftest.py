"""In CI (REQUIRE_ALL=1) a test that skips has failed: what it needs must be there."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainfleet.trust import untrusted_input

if importlib.util.find_spec("botocore"):  # which a machine that only has a GPU to try lacks
    from aws import validation

    validation.install()  # of every request to AWS that any test makes, whoever answers it

# A Ctrl-C that a test sends arrives, also where a shell started the tests in the background, which ignores it in all children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What follows from how fast this machine is would not be the same on another: tests go by this trial, and ranks that they start.
with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="trial-", delete=False) as _file:
    json.dump(
        {"cpu": "a test's", "torch": "2", "cores": 2, "fp32": 1e11, "onednn": 0.0, "bf16": 5e10},
        _file,
    )
os.environ["TRAINFLEET_TRIAL"] = _file.name
atexit.register(os.unlink, _file.name)

# What tests start listens on the loopback, which no proxy of this machine reaches; what libraries keep at home goes with the tests.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost,::1"
_home = tempfile.TemporaryDirectory(prefix="trainfleet-tests-")
os.environ["HF_HOME"] = _home.name
os.environ["OFFLINE"] = "1"  # no package index is asked but recorded ones (`indexes`)

# `make test` leaves these in the environment; the make of a user that a test plays starts without them.
for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKECMDGOALS", "PYTHONSAFEPATH"):
    os.environ.pop(name, None)
os.environ.setdefault(
    "PYTHONPATH", str(Path(__file__).parents[1] / "python")
)  # as make has it: processes that tests start find us


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a test, or the program in its process, leaves in the environment is not the next one's: NODES is a make variable.

    Nor is what it does at a signal, which processes that it starts would inherit, a folder that it has sealed, or a working directory
    that is gone with the test that had entered it.
    """
    untrusted_input._SEALED.clear()  # of what other modules sealed as they were imported, too
    before = dict(os.environ)
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir(Path(__file__).parents[1])
    yield
    os.environ.clear()
    os.environ.update(before)
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


# The files that take longest begin, so that no worker has one of them at the end; ranks of several go beside what mostly waits.
LONGEST = ("test_line.py", "test_training.py", "test_lease.py", "test_fleet.py", "test_run_readers.py", "test_map.py", "test_honoured.py", "test_memory.py",
           "test_bucket_runs.py", "test_foreign_sample.py", "test_locks.py", "test_foreign_checkpoints.py", "test_verdict_corpus.py",
           "test_report_page.py", "test_launching.py", "test_crashes.py", "test_pip_sources.py")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    if report.skipped and os.environ.get("REQUIRE_ALL") == "1" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which is a failure here: {report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr}"
    return report


def pytest_collection_finish() -> None:
    """Thousands of tests and all that they have imported stay to the end: no later look for garbage goes through them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line that is wanted of a test that passes too: a table of what it measured."""
    capture: Any = request.config.pluginmanager.get_plugin("capturemanager")

    def tell(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, flush=True)

    return tell


@pytest.fixture
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The recorded package indexes (tests/indexes.py), which this test's program asks, and no answer from before."""
    from indexes import served

    monkeypatch.setenv("OFFLINE", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with served() as found:
        yield found
