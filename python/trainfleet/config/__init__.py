"""Loads config.yaml, validates it, and converts it to frozen dataclasses."""

from .derive import Derivation, Derived, dump_asked, dump_resolved
from .load import (
    BackendTerms,
    Settings,
    dump_known,
    load,
    load_name,
    load_resolved,
    load_steps,
    place_of,
)
from .types import Config, Refusals, flat

__all__ = [
    "BackendTerms",
    "Config",
    "Derivation",
    "Derived",
    "Refusals",
    "Settings",
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
