"""Every key of fleet on every backend: it changes what is planned, or somebody is named who uses it later, or it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from trainfleet.backends import backend_of, sagemaker_request, supported_keys, terms_of
from trainfleet.backends.slurm import cluster_file
from trainfleet.cloud import checks, scheduler_template, template
from trainfleet.cloud.prices import by_table
from trainfleet.cloud.spending import of_batch
from trainfleet.cloud.template_inputs import Inputs
from trainfleet.config import Config, Settings, load
from trainfleet.config.schema import load_schema, walk
from trainfleet.config.types import Queue
from trainfleet.launch import job_image
from trainfleet.plan.job import tokenize_job, train_job
from trainfleet.recipes import FOLDER

ROOT = Path(__file__).parents[2] / "python/trainfleet"
PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ1qkUmTbFzOXSxV7b9fXkD6wzhTnnZlZ0Yb0a3m0000 you@here"
RECIPES = {
    "ssh": "llama-3-8b-p5",
    "ec2": "roberta-large-p3dn-ec2",
    "slurm": "llama-3-8b-p5-slurm",
    "parallelcluster": "bert-large-trn1-parallelcluster",
    "batch": "llama-2-7b-trn1-batch",
    "sagemaker": "llama-2-7b-p4d-sagemaker",
}
# Another value than the default, and what must go with it. A key that is not here gets one by its type.
OTHERS: dict[str, dict[str, Any]] = {
    "fleet.aws.capacity": {
        "fleet.aws.capacity": "reservation",
        "fleet.aws.reservation": "cr-0123456789abcdef0",
    },
    "fleet.aws.reservation": {
        "fleet.aws.capacity": "block",
        "fleet.aws.reservation": "cr-0123456789abcdef0",
    },
    "fleet.aws.vpc": {
        "fleet.aws.vpc": "vpc-0123456789abcdef0",
        "fleet.aws.subnets": ("subnet-0123456789abcdef9",),
    },
    "fleet.aws.subnets": {
        "fleet.aws.vpc": "vpc-0123456789abcdef0",
        "fleet.aws.subnets": ("subnet-0123456789abcdef8",),
    },
    "fleet.aws.allow_ssh_from": {"fleet.aws.allow_ssh_from": ("203.0.113.7/32",)},
    "fleet.aws.zones": {"fleet.aws.zones": ("us-east-1f",)},
    "fleet.fsx.throughput": {"fleet.fsx.throughput": 500, "fleet.fsx.type": "persistent"},
    "fleet.aws.volume_gib": {"fleet.aws.volume_gib": 777},
    "fleet.sagemaker.input_mode": {"fleet.sagemaker.input_mode": "fastfile"},
    "fleet.secret_arns": {
        "fleet.secret_arns": ("A=arn:aws:secretsmanager:us-east-1:123456789012:secret:a-Ab1Cd2",)
    },
    "fleet.batch.consumable_resources": {"fleet.batch.consumable_resources": ("licence=1",)},
    "fleet.slurm.parallelcluster.queues": {
        "fleet.slurm.parallelcluster.queues": (
            Queue("big", "trn1.32xlarge", 0, 9, "on-demand", None),
        )
    },
    "fleet.slurm.create": {"fleet.slurm.create": "parallelcluster"},
    "fleet.hosts": {"fleet.hosts": ("a", "b")},
}
# Who uses a key that changes nothing in what is planned: the launcher, when it opens a link or makes something.
LATER = {
    "fleet.hosts": "hosts/fleet.py", "fleet.ssh": "hosts", "fleet.exclusive": "backends/ssh.py", "fleet.install_docker": "hosts/install_steps.py",
    "fleet.spot": "engine/__main__.py", "fleet.python": "hosts/install_steps.py", "fleet.aws.region": "cloud/calls.py",
    "fleet.fsx": "hosts/install_steps.py", "fleet.aws.zones": "cloud/discovery.py", "fleet.aws.key_pair": "cloud/template.py",
    "fleet.aws.ami": "cloud/discovery.py", "fleet.aws.vpc": "cloud/template_parts.py", "fleet.slurm": "backends/slurm",
    "fleet.sagemaker": "backends/sagemaker.py", "fleet.batch": "backends/batch.py", "fleet.aws.reservation": "cloud/template.py",
}  # fmt: skip
FLEET = [
    ".".join(key)
    for key, part in walk(load_schema())
    if key[0] == "fleet" and "object" not in part.get("type", ())
]
RESTRICTED = [key for key in FLEET if key in supported_keys.table()]


def base(kind: str) -> Config:
    return load(Settings(FOLDER / f"{RECIPES[kind]}.yaml"), terms_of)[0]


def changed(config: Config, key: str) -> Config:
    """The config with another value there than it has and than is the default."""
    if key in OTHERS:
        for name, value in OTHERS[key].items():
            config = with_value(config, name.split("."), value)
        return config
    part = next(part for name, part in walk(load_schema()) if ".".join(name) == key)
    return with_value(config, key.split("."), other(part, attrgetter(key)(config)))


def other(part: dict[str, Any], now: Any) -> Any:
    if "enum" in part:
        return next(
            value for value in part["enum"] if value not in (now, part.get("default"), None)
        )
    kinds = part["type"] if isinstance(part["type"], list) else [part["type"]]
    if "boolean" in kinds:
        return not part["default"]
    if "integer" in kinds or "number" in kinds:
        low = int(part.get("minimum", 1))
        return next(
            value
            for value in (low + 1, low + 2, low + 3)
            if value not in (now, part.get("default"))
        )
    examples = [
        value for value in part.get("examples", ()) if value not in (now, part.get("default"))
    ]
    text = examples[0] if examples else "another"
    return tuple(text) if isinstance(text, list) else (text,) if "array" in kinds else text


def with_value(tree: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    return replace(
        tree, **{first: with_value(getattr(tree, first), rest, value) if rest else value}
    )


def planned(kind: str, config: Config) -> str:
    """All that a config sends or writes on a backend, as far as nobody needs to be asked."""
    aws = config.fleet.aws
    region, zone = aws.region or "us-east-1", (*aws.zones, "us-east-1b")[0]
    inputs = Inputs(region, zone, "123456789012", "you", aws.ami or "ami-0123456789abcdef0", "2026-11-22T06:00:00+00:00",
                    tuple(range(config.fleet.nodes)), public_key="" if aws.key_pair else PUBLIC, subnet=(*aws.subnets, None)[0])  # fmt: skip
    if kind == "ec2":
        return template.render(config, inputs)
    if kind == "parallelcluster":
        return repr([artifact.text for artifact in cluster_file.artifacts(config)])
    named = job_image.named(config)
    backend = backend_of.__wrapped__(named)  # type: ignore[attr-defined]
    if kind in ("batch", "sagemaker"):
        jobs = [backend.plan(job, {}).artifacts for job in (tokenize_job(named), train_job(named))]
        prices = of_batch(config, by_table()) if kind == "batch" else None
        return scheduler_template.render(config, inputs, kind) + repr((jobs, prices))
    return repr(config.fleet.rendezvous_port)  # what is sent there needs hosts, or sbatch


@pytest.mark.parametrize("kind", RECIPES)
def test_no_recipe_has_a_key_that_its_backend_does_not_use(kind: str) -> None:
    assert not [*supported_keys.refuse(base(kind))]


PAIRS = [
    pytest.param(kind, key, id=f"{key}-{kind}", marks=[pytest.mark.thorough] if number % 4 else [])
    for number, (key, kind) in enumerate((key, kind) for key in RESTRICTED for kind in RECIPES)
]


@pytest.mark.parametrize(("kind", "key"), PAIRS)
def test_a_key_counts_or_is_refused(kind: str, key: str) -> None:
    before = base(kind)
    after = changed(before, key)
    said = [message for named, message in supported_keys.refuse(after) if named == key]
    if kind not in supported_keys.table()[key][0]:
        assert len(said) == 1 and "does not use it; remove it" in said[0], said
        return
    assert not said
    if takes_effect(kind, before, after):
        return
    later = next(
        (where for name, where in LATER.items() if key == name or key.startswith(f"{name}.")), ""
    )
    assert later and uses(later, key.rpartition(".")[2]), f"{key} is silent on {kind}"


def takes_effect(kind: str, before: Config, after: Config) -> bool:
    """Whether it is planned otherwise, or a rule says why not."""
    rules = {"ec2": checks.refuse, "batch": checks.refuse_of_scheduler, "parallelcluster": cluster_file.refuse,
             "sagemaker": sagemaker_request.refuse}  # fmt: skip
    refused = [*rules[kind](after)] if kind in rules else []
    return bool(refused) or planned(kind, before) != planned(kind, after)


def uses(where: str, name: str) -> bool:
    return any(f".{name}" in path.read_text() for path in files(ROOT / where))


def files(where: Path) -> Iterator[Path]:
    yield from where.rglob("*.py") if where.is_dir() else (where,)


def test_this_machine_sets_aside_what_is_said_of_others() -> None:
    config = base("ec2")
    assert not [
        *supported_keys.refuse(replace(config, fleet=replace(config.fleet, backend="local")))
    ]
