"""The network of a cluster with a config that names no subnets: a stack that is made before the
cluster and removed after it.

It belongs to the config that made the cluster; a second config on that cluster uses the same
subnets.
"""

from __future__ import annotations

import json
from dataclasses import replace

import yaml

from ...cloud.engine_fleet import EngineFleet
from ...cloud.engine_template import NETWORK
from ...config import Config
from ...plan.request import Artifact
from ...trust.errors import NotAsked
from ..request_json import artifact

FILE = "network.yaml"


def stack_of(config: Config, maker: str = "") -> EngineFleet:
    """Returns the stack of the network; `maker` is the config that made the cluster, if it
    exists.
    """
    return EngineFleet(replace(config, name=maker or config.fleet_name), NETWORK)


def placed(config: Config, maker: str = "") -> Config:
    """Returns the config with subnets for nodes and head: its own, or those of the existing
    stack.
    """
    fleet = config.fleet
    if fleet.aws.subnets:
        return config
    try:
        state = stack_of(config, maker).stack.look()
    except NotAsked:
        state = None
    if state is None or not {"Private", "Public"} <= state.outputs.keys():
        return config
    cluster = replace(fleet.slurm.parallelcluster, head_subnet=state.outputs["Public"])
    aws, slurm = (
        replace(fleet.aws, subnets=(state.outputs["Private"],)),
        replace(fleet.slurm, parallelcluster=cluster),
    )
    return replace(config, fleet=replace(fleet, aws=aws, slurm=slurm))


def changes(config: Config, maker: str = "") -> tuple[Artifact, ...]:
    """Returns the request that would make or change the network; empty for the user's own subnets,
    or another config's network.
    """
    if config.fleet.aws.subnets or maker not in ("", config.fleet_name):
        return ()
    found: list[Artifact] = []
    for number, (service, operation, body) in enumerate(
        stack_of(config).foresee(set()).requests, 1
    ):
        template = json.loads(str(body["TemplateBody"]))
        found += [
            Artifact(FILE, yaml.safe_dump(template, sort_keys=False)),
            artifact(number, service, operation, body),
        ]
    return tuple(found)
