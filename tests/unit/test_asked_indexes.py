"""The indexes are asked before anything is made. They are recorded ones, on the loopback (tests/indexes.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
from test_pins import HOSTS, ROOT

from indexes import Indexes
from trainfleet.config import Config, Settings, load
from trainfleet.hosts import platform as pins
from trainfleet.hosts.install_steps import environment_words
from trainfleet.hosts.platform import Pin, load_platform
from trainfleet.recipes import FOLDER
from trainfleet.trust.errors import BackendError

LOGIN = "<html><body>Welcome to our network. <form>Password</form></body></html>"


@pytest.fixture(scope="module")
def config() -> Config:
    return load(Settings(FOLDER / "trn1-single-node.yaml"))[0]


def of(config: Config, platform: str, system: str) -> tuple[Pin, ...]:
    """What nodes of a system, and an image, take from indexes."""
    fleet = replace(config.fleet, platform=platform, python=None, container="none")
    return pins.pins_of(replace(config, fleet=fleet), system, builds=True)


@pytest.fixture(scope="module")
def everything(config: Config) -> tuple[Pin, ...]:
    found = tuple(
        dict.fromkeys(
            chain.from_iterable(of(config, platform, system) for platform, system in HOSTS)
        )
    )
    assert len(found) > 20
    return found


@pytest.mark.parametrize(
    ("platform", "system"),
    [(platform, system) for platform, system in HOSTS if system.startswith("ubuntu")],
)
def test_all_pins_are_on_the_recorded_pages(
    platform: str, system: str, config: Config, indexes: Indexes
) -> None:
    assert pins.ask(of(config, platform, system)) == ([], [])


def test_whichever_pin_is_gone_it_is_refused_by_its_name(
    everything: tuple[Pin, ...], indexes: Indexes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "DAY", 0.0)  # rows that no pin needs are gone, too
    refused, all_rows = set[str](), indexes.rows
    for row in all_rows:
        indexes.rows = [one for one in all_rows if one != row]
        wrong, unasked = pins.ask(everything)
        assert not unasked and all(
            row[0] in line and line.endswith(" is missing") for line in wrong
        ), wrong
        for line in wrong:
            refused.add(line.removesuffix(" is missing"))
    assert refused == {f"{pin.what} at {pin.page}" for pin in everything}
    print(f"{len(refused)} of {len(everything)} pins refused, of {len(all_rows)} rows taken away")


def test_another_file_of_the_same_name_is_refused(
    everything: tuple[Pin, ...], indexes: Indexes
) -> None:
    indexes.rows = [
        (page, name, "0" * 64 if "cp312" in name and "cu126" in page else sum_)
        for page, name, sum_ in indexes.rows
    ]
    ((line,), _) = pins.ask(everything)
    assert (
        line
        == "torch 2.13.0 for Python 3.12 with the locked hash at https://download.pytorch.org/whl/cu126/torch/ is missing"
    )


@pytest.mark.parametrize("host", ["download.pytorch.org", "pip.repos.neuron.amazonaws.com", "apt.repos.neuron.amazonaws.com",
                                  "efa-installer.amazonaws.com", "registry-1.docker.io"])  # fmt: skip
def test_a_page_that_wants_a_login_is_no_index(host: str, config: Config, indexes: Indexes) -> None:
    indexes.instead[host] = LOGIN
    wrong, unasked = pins.ask(of(config, "neuron-xla", "ubuntu2404"))
    assert (
        wrong
        and not unasked
        and all(host in line and "check whether a proxy requires a login" in line for line in wrong)
    )


def test_what_can_t_be_reached_is_said_and_refuses_nothing(
    config: Config,
    indexes: Indexes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pins, "SECONDS", 0.2)
    indexes.silent, begun = True, time.monotonic()
    pins.require_pins(of(config, "cuda-volta", "ubuntu2404"))
    assert time.monotonic() - begun < 20, "a silent index is not waited for"
    (said,) = capsys.readouterr().out.splitlines()
    hosts = ("download.pytorch.org: ", "efa-installer.amazonaws.com: ", "registry-1.docker.io: ")
    assert said.startswith("pins: not checked: ") and all(host in said for host in hosts)
    # not by monkeypatch, which would put back the function that `indexes` had put there
    with mock.patch("urllib.request.urlopen", side_effect=OSError("no route to host")):
        assert pins.ask(of(config, "cuda", "ubuntu2404"))[1] == [
            "not checked: " + "; ".join(f"{host}no route to host" for host in hosts[1:])
        ]


@pytest.mark.parametrize("answer", [LOGIN, "[]", "{}", '{"token": 3}'])
def test_a_registry_that_gives_no_leave_to_read_could_not_be_asked(
    answer: str, config: Config, indexes: Indexes
) -> None:
    indexes.instead["auth.docker.io"] = answer
    wrong, (why,) = pins.ask(of(config, "cuda", "ubuntu2404"))
    assert not wrong and why.startswith("not checked: registry-1.docker.io: ")


def test_what_was_there_is_asked_for_again_after_a_day(
    config: Config, indexes: Indexes, tmp_path: Path
) -> None:
    wanted = of(config, "neuron-xla", "ubuntu2404")
    for _ in range(2):
        assert pins.ask(wanted) == ([], [])
    assert (
        len(indexes.asked) == len({pin.page for pin in wanted}) + 1
    )  # the registry's leave to read
    (mark,) = (tmp_path / "cache/trainfleet").iterdir()
    os.utime(mark, (0, time.time() - pins.DAY - 1))
    assert pins.ask(wanted) == ([], []) and len(indexes.asked) == 2 * (
        len({pin.page for pin in wanted}) + 1
    )


def test_no_index_is_asked_offline(
    config: Config, indexes: Indexes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLINE", "1")
    assert (
        pins.ask(of(config, "cuda-volta", "ubuntu2404")) == ([], ["not checked: OFFLINE=1"])
        and not indexes.asked
    )


def test_a_pin_that_is_gone_ends_a_set_up(config: Config, indexes: Indexes) -> None:
    indexes.rows = [
        row
        for row in indexes.rows
        if row[1] != "nki-0.5.0+28631259367.ga768afa6-cp312-cp312-linux_x86_64.whl"
    ]
    with pytest.raises(BackendError) as caught:
        pins.require_pins(of(config, "neuron-xla", "ubuntu2404"))
    assert (
        "nki 0.5.0 for Python 3.12 at https://pip.repos.neuron.amazonaws.com/nki/ is missing"
        in str(caught.value)
    )
    assert "OFFLINE=1" in caught.value.next


@pytest.mark.thorough
@pytest.mark.parametrize("lack", ["", "nki==0.5.0"])
def test_trn1_s_environment_is_installed_from_the_recorded_indexes(
    lack: str, indexes: Indexes, tmp_path: Path
) -> None:
    """The real python.sh and pip. The packages are empty, with the metadata of the real ones; sums are those of the empty ones."""
    indexes.stubs = True
    (tmp_path / "scripts").mkdir()
    for name in ("pip_sources.py", "python.sh", "unpinned.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "requirements.lock").write_text(
        "torch==2.0 \\\n    --hash=sha256:" + "0" * 64 + "\n"
    )
    sums = {sum_: indexes.sum_of(name, sum_) for _, name, sum_ in indexes.rows}
    words = [
        word.replace("https://", f"{indexes.address}/")
        for word in environment_words(load_platform("neuron-xla"), str(tmp_path / "env"))
    ]
    words = [
        f"--hash=sha256:{sums[word[14:]]}" if word.startswith("--hash") else word
        for word in words
        if word != lack
    ]
    path = ":".join(part for part in os.environ["PATH"].split(":") if not Path(part, "uv").exists())
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))
    }
    kept |= {
        "PATH": path,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"{indexes.address}/usual/",
    }
    done = subprocess.run(
        ["bash", "scripts/python.sh", "apply", *words],
        cwd=tmp_path,
        env=kept,
        capture_output=True,
        text=True,
    )
    assert done.returncode == bool(lack), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "python: nki is asked for" if lack else f"python: {tmp_path}/env, torch 2.9.1"
    )
    found = [
        path.name for path in (tmp_path / "env").glob("lib/python3*/site-packages/*.dist-info")
    ]
    assert any(name.startswith("neuronx_cc-2.26.6360.0+") for name in found)
    assert any(name.startswith("nki-0.5.0+28631259367") for name in found) != bool(lack)
