"""The launch plans of Trainium fleets, line by line as they were judged, each with the document that it follows beside it.

A golden file has two columns: what the plan says, and after `<-` the source: a document with its date, or `ours`, for what this
program adds to it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from trainfleet.backends import terms_of
from trainfleet.backends.batch import Batch
from trainfleet.backends.slurm import Slurm
from trainfleet.backends.ssh import Ssh
from trainfleet.config import Config, Settings, load
from trainfleet.hosts.facts import Facts
from trainfleet.hosts.fleet import Quarantine
from trainfleet.hosts.host_results import Host
from trainfleet.plan.job import Artifact, Job, train_job
from trainfleet.plan.measurement import compile_only

GOLDEN = Path(__file__).parent / "golden_trainium"
ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "python/trainfleet/recipes"
BETWEEN = "  <- "
ON_SSH = "fleet.backend=ssh fleet.hosts=[10.0.0.1] fleet.shared_folder=/home/ubuntu/trainfleet fleet.aws.region=null fleet.idle_minutes=120"
CASES = {  # recipe, keys
    "trn1-single-node": ("trn1-single-node", ON_SSH),
    "trn1-single-node-compile": ("trn1-single-node", ON_SSH),
    "trn1-x16-slurm": ("bert-large-trn1", "fleet.backend=slurm fleet.slurm.partition=trn1"),
    "trn1-x4-batch": ("llama-2-7b-trn1-batch", ""),
    "trn2-x4-ssh": ("llama-3-8b-trn2", "fleet.hosts=[10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4]"),
}
SOURCE = re.compile(r"ours|as above|.+, 20\d\d-\d\d-\d\d")


def config_of(case: str) -> Config:
    recipe, keys = CASES[case]
    config = load(Settings(RECIPES / f"{recipe}.yaml", keys), terms_of)[0]
    return compile_only(config, "compile-0123456789ab") if case.endswith("compile") else config


def artifacts(config: Config) -> tuple[Artifact, ...]:
    job = train_job(config)
    if config.fleet.backend == "batch":
        return Batch(config).plan(Job.of(job.record() | {"image": "IMAGE"}), {}).artifacts
    if config.fleet.backend == "slurm":
        return Slurm(config).plan(job, {}).artifacts
    backend = Ssh(config)
    backend.head().facts = {host: facts(host) for host in backend.transport.hosts}
    with mock.patch.object(Quarantine, "held", lambda *_: {}):
        return backend.plan(job, {}).artifacts


def facts(host: Host) -> Facts:
    return Facts(
        hostname=host.name, cores=128, addresses={host.address: "ens32"}, mtu={"ens32": 9001}
    )


def lines(case: str) -> list[str]:
    """A plan's lines, without what is this checkout's: the hash of its code and the Python that runs the tests."""
    found = artifacts(config_of(case))
    if len(found) > 1 and found[0].name.endswith(".sh"):
        found = (found[0], found[-1])
    text = "\n".join(f"== {artifact.name}\n{plain(artifact)}" for artifact in found)
    text = re.sub(r"/code/[0-9a-f]{16}", "/code/HASH", text)
    text = re.sub(r"neuron(-xla)? 20\d\d-\d\d-\d\d [0-9a-f]{12}", "LOCK", text)
    text = re.sub(r"-train-[0-9a-f]{12}", "-train-HASH", text)
    text = (
        re.sub(r"/env/[^/ ]+/", "/env/STACK/", text)
        .replace(sys.executable, "PYTHON")
        .replace(str(ROOT), "HERE")
    )
    return [line.rstrip() for line in text.splitlines()]


def plain(artifact: Artifact) -> str:
    return (
        artifact.text.replace(" \\\n  ", " ")
        if artifact.name.endswith((".sh", ".sbatch"))
        else compact(artifact.text)
    )


def compact(text: str) -> str:
    """A body with a line a leaf, as its place and its value; a device file is told once."""
    rows = [f"{place} = {json.dumps(value)}" for place, value in leaves(json.loads(text), "")]
    return "\n".join(
        row
        for row in rows
        if ".devices[].containerPath" not in row and ".devices[].permissions" not in row
    )


def leaves(value: object, place: str) -> list[tuple[str, object]]:
    if isinstance(value, dict) and set(value) == {"name", "value"}:
        return [(f"{place} {value['name']}", value["value"])]
    if isinstance(value, dict):
        return [
            leaf
            for key, item in value.items()
            for leaf in leaves(item, f"{place}.{key}".lstrip("."))
        ]
    if isinstance(value, list) and value and not all(isinstance(item, str) for item in value):
        return [leaf for item in value for leaf in leaves(item, f"{place}[]")]
    return [(place, value)]


def golden(case: str) -> list[tuple[str, str]]:
    text = (GOLDEN / f"{case}.txt").read_text()
    return [
        (line, source) for line, _, source in (row.rpartition(BETWEEN) for row in text.splitlines())
    ]


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_as_it_was_judged(case: str) -> None:
    assert lines(case) == [line.rstrip() for line, _ in golden(case)]


@pytest.mark.parametrize("case", CASES)
def test_each_line_has_its_document_and_date(case: str) -> None:
    for line, source in golden(case):
        assert SOURCE.fullmatch(source), line
    cited = {source for _, source in golden(case)} - {"ours", "as above"}
    assert len(cited) >= 4, "a plan that follows AWS's documents says which"
