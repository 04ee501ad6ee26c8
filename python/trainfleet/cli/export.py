"""make export: the newest checkpoint as a Hugging Face folder, OUT, or in NxD Core's format
(FORMAT).
"""

from __future__ import annotations

from ..config import platforms
from ..launch.run_location import export
from ..trust.errors import ConfigError
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    if "OUT" not in variables:
        raise ConfigError.of("OUT", "must name a new folder", next="make export OUT=my-model")
    try:
        platforms.degrees(variables.get("FORMAT") or platforms.HUGGINGFACE)
    except ValueError as error:
        raise ConfigError.of(
            "FORMAT", str(error), next="make export OUT=my-model FORMAT=nxd-tp8"
        ) from error
    return export(variables)
