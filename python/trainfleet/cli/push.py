"""make push: the container image, built if missing, in ECR under a tag of its content."""

from __future__ import annotations

from ..launch import job_image
from ..launch.command import config_of, settings_of
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    config, _ = config_of(settings_of(variables))
    return job_image.push(config)
