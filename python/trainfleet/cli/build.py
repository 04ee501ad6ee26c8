"""make build: the container image of fleet.platform, built here from docker/ and the lock."""

from __future__ import annotations

from ..launch import job_image
from ..launch.command import config_of, settings_of
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    config, _ = config_of(settings_of(variables))
    return job_image.build(config)
