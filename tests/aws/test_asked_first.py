"""Package indexes are asked before AWS is asked for anything that is paid for; a plan is the same whatever they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from aws.account import Account
from aws.world import config_of
from indexes import Indexes
from trainfleet.backends import backend_of
from trainfleet.cli import plan as verb
from trainfleet.config import Config, Settings, load
from trainfleet.hosts import platform as pins
from trainfleet.launch import job_image, provisioning
from trainfleet.recipes import FOLDER
from trainfleet.trust.errors import BackendError

GONE = "aws-neuronx-tools", "2.31.13.0"
RECIPES = {
    "trn1-single-node": 11,
    "llama-2-7b-trn1-batch": 11,
    "llama-2-7b-p4d-sagemaker": 2,
}  # with how many pins


def trn1() -> Config:
    return load(Settings(FOLDER / "trn1-single-node.yaml"))[0]


def test_setup_makes_nothing_where_a_pin_is_gone(account: Account, indexes: Indexes) -> None:
    indexes.rows = [row for row in indexes.rows if row[1:] != GONE]
    before = set(account.things)
    with pytest.raises(BackendError) as caught:
        provisioning.make_ready(trn1())
    said = "aws-neuronx-tools 2.31.13.0 at https://apt.repos.neuron.amazonaws.com/dists/noble/main/binary-amd64/Packages is missing"
    assert caught.value.why == said and set(account.things) == before


def test_an_image_is_not_built_where_its_base_is_gone(account: Account, indexes: Indexes) -> None:
    indexes.rows = [row for row in indexes.rows if "/manifests/" not in row[0]]
    with pytest.raises(BackendError) as caught:
        job_image.build(trn1())
    assert "ubuntu:24.04@sha256:" in caught.value.why and caught.value.why.endswith("is missing")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plan_says_what_is_gone_and_writes_the_same(
    recipe: str,
    tmp_path: Path,
    indexes: Indexes,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an account."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "trainfleet.cloud.clock.now", lambda: 1_790_000_000.0
    )  # which stands in what is made

    def plan(out: str) -> tuple[str, dict[str, bytes]]:
        backend_of.cache_clear()
        assert verb.plan({"CONFIG": str(FOLDER / f"{recipe}.yaml"), "OUT": out}, 0.0) == 0
        return capsys.readouterr().out, {
            path.name: path.read_bytes() for path in (tmp_path / out).rglob("*") if path.is_file()
        }

    good = plan("good")
    indexes.rows = [row for row in indexes.rows if not row[0].startswith("https://efa-installer")]
    monkeypatch.setattr(pins, "DAY", 0.0)
    bad = plan("gone")
    monkeypatch.setenv("OFFLINE", "1")
    offline = plan("none")
    assert (
        f"\npins: all {RECIPES[recipe]} pinned versions are available\n" in good[0]
        and "\npins: not checked: OFFLINE=1\n" in offline[0]
    )
    gone = "EFA installer 1.51.0 at https://efa-installer.amazonaws.com/aws-efa-installer-1.51.0.tar.gz is missing"
    assert f"\npins: {gone}\n" in bad[0]
    assert good[1] == bad[1] == offline[1] and len(good[1]) > 2


def test_machines_that_are_there_need_no_index(account: Account, tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        backend="ssh",
        hosts=["10.0.0.1"],
        nodes=1,
        aws={"bastion_type": None, "region": None, "allow_ssh_from": []},
    )
    assert provisioning.pinned(config) == ()
