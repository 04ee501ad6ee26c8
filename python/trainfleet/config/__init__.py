"""config.yaml → checked → frozen dataclasses: once, at the edge."""

from .derive import Derived
from .load import (
    Derivation,
    Settings,
    Terms,
    dump_asked,
    dump_known,
    dump_resolved,
    load,
    load_name,
    load_resolved,
    load_steps,
    place_of,
)
from .types import Config, flat

__all__ = [
    "Config",
    "Derivation",
    "Derived",
    "Settings",
    "Terms",
    "dump_asked",
    "dump_known",
    "dump_resolved",
    "flat",
    "load",
    "load_name",
    "load_resolved",
    "load_steps",
    "place_of",
]
