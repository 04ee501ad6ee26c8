"""Generates schema/ from the config dataclasses: `python -m trainfleet.config.reference`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..process.install_paths import ROOT
from . import key
from .schema import is_group, walk
from .types import Config
from .yaml_lines import dotted

FOLDER = ROOT / "schema"

HEAD = """# Keys of config.yaml

`python -m trainfleet.config.reference` generates this page and [config.schema.json](config.schema.json) from the dataclasses in
`python/trainfleet/config/types*.py`; edit those.
A missing key has its default. `null` means that the value is derived; `make plan` shows the value and the reason.
Any key can be set for one command: `make train SET='train.steps=50 train.seed=2'`.
If only some backends use a key, *Used by* lists them. A key without a list has the list of its group. The other backends
refuse the key, except local, which ignores it. `parallelcluster` is slurm on a created cluster (`fleet.slurm.create`).
"""  # noqa: E501


def files() -> dict[str, str]:
    """Returns the contents of schema/ by file name: the JSON Schema for editors, and the page of
    all keys.
    """
    schema = key.HEAD | key.schema_of(Config, described=True)
    return {
        "config.schema.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n",
        "README.md": render(schema),
    }


def render(schema: key.Schema) -> str:
    """Renders the page of all keys as Markdown, with a table per group."""
    lines = [HEAD, *_table("", schema)]
    for path, part in walk(schema):
        if is_group(part):
            about = _plain(part["description"]) + _backends(part)
            lines += [f"\n## {dotted(path)}\n", f"{about}\n", *_table(f"{dotted(path)}.", part)]
    return "\n".join(lines) + "\n"


def _table(prefix: str, schema: key.Schema) -> Iterator[str]:
    yield "| key | type | default | unit | allowed | meaning |"
    yield "|---|---|---|---|---|---|"
    for name, part in schema["properties"].items():
        if is_group(part):
            continue
        types = part["type"] if isinstance(part["type"], list) else [part["type"]]
        default = f"`{json.dumps(part['default'])}`" if "default" in part else "required"
        cells = (
            f"`{prefix}{name}`",
            " or ".join(types),
            default,
            part.get("unit", ""),
            _allowed(part),
            _plain(part["description"]) + _backends(part),
        )
        yield f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Escapes `<` outside code, because Markdown would drop `<name>` as an HTML tag."""
    parts = text.split("`")
    return "`".join(
        part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts)
    )


def _backends(part: key.Schema) -> str:
    """Lists the backends that use a key or group, or returns "" if all do.

    The other backends reject the key, except local, which ignores it.
    """
    return f" Used by: {', '.join(part['backends'])}." if "backends" in part else ""


def _allowed(part: key.Schema) -> str:
    if "anyOf" in part:
        return ", or ".join(_allowed(choice) for choice in part["anyOf"])
    if "enum" in part:
        return ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in part["enum"])
    signs = (
        ("minimum", "≥"),
        ("exclusiveMinimum", ">"),
        ("maximum", "≤"),
        ("exclusiveMaximum", "&lt;"),
    )
    bounds = [f"{sign} {part[name]}" for name, sign in signs if name in part]
    # Use examples instead of a pattern, because a `|` in a pattern would end the table cell.
    if "pattern" in part and "examples" in part:
        return "such as " + ", ".join(f"`{example}`" for example in part["examples"])
    return ", ".join(bounds) or (f"`{part['pattern']}`" if "pattern" in part else "")


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
