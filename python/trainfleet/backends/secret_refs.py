"""Passes secrets to AWS's engines by reference, as no request may contain a value.

A name of fleet.secrets with an ARN in fleet.secret_arns refers to that secret. The value of any
other is read on the launching machine and kept in SSM as a SecureString,
/trainfleet/<config>/<NAME>, until `make clean`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..cloud.calls import Calls
from ..cloud.template_inputs import own_tags, pairs
from ..config import Config
from ..trust.errors import BackendError
from .node_script import values_of

LONGEST = 4096  # bytes of a parameter of the standard tier


def folder(config: Config) -> str:
    """Returns the prefix of a config's parameters."""
    return f"/trainfleet/{config.fleet_name}"


def references(config: Config, names: Iterable[str]) -> dict[str, str]:
    """Returns name → the address of its value, which `keep` may still have to write."""
    given = dict(entry.split("=", 1) for entry in config.fleet.secret_arns)
    return {name: given.get(name) or f"{folder(config)}/{name}" for name in names}


def keep(calls: Calls, config: Config, names: Iterable[str]) -> None:
    """Writes the values of the names without an ARN to SSM; BackendError if one is not set here, or
    too long.
    """
    own = {
        name: where for name, where in references(config, names).items() if where.startswith("/")
    }
    values = values_of(own)
    for name, where in own.items():
        if len(values[name].encode()) > LONGEST:
            raise BackendError(
                f"{name} is longer than SSM allows ({LONGEST} bytes)",
                where="fleet.secrets",
                next=f"put it in Secrets Manager, and in fleet.secret_arns: {name}=arn:...",
            )
        calls(
            "ssm",
            "PutParameter",
            Name=where,
            Value=values[name],
            Type="SecureString",
            Overwrite=True,
        )
        marks = pairs(own_tags(config.fleet_name))
        # PutParameter does not take tags together with Overwrite
        calls("ssm", "AddTagsToResource", ResourceType="Parameter", ResourceId=where, Tags=marks)
