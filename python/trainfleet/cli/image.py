"""make image: bakes a machine image (AMI) for nodes of the ec2 backend; make build makes the
container image of jobs.
"""

from __future__ import annotations

from ..launch.command import config_of, settings_of
from ..launch.provisioning import bake
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    return bake(config_of(settings_of(variables))[0])
