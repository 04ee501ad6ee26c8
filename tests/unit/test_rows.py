"""One row a thing: no file but its owner compares the name of an instance type, an optimizer, a family, a cause, a fault, a format."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_walls import FILES, PACKAGE

from trainfleet.config.families import FAMILIES
from trainfleet.config.optimizers import OPTIMIZERS
from trainfleet.config.schema import load_schema
from trainfleet.config.tables import named
from trainfleet.data.format_table import FORMATS, by_suffix, format_of
from trainfleet.hardware import node_types
from trainfleet.health.faults import FAULTS
from trainfleet.trust.errors import InputError
from trainfleet.watch.causes import CAUSES

# Kind of thing → its names, its owners (files, or folders with a slash at the end), and where alone its names are looked for.
KINDS: dict[str, tuple[set[str], tuple[str, ...], str]] = {
    "type": (
        {*node_types.INSTANCE_TYPES, *(row.family for row in node_types.INSTANCE_TYPES.values())},
        (),
        "",
    ),
    "optimizer": ({*OPTIMIZERS}, ("config/optimizers.py",), ""),
    "family": ({*FAMILIES}, ("config/families.py",), ""),
    "fault": (
        {*FAULTS} - {"nan", "notice", "read-only"},
        ("health/faults.py", "launch/faults.py"),
        "",
    ),  # three words that mean more
    "format": ({*by_suffix()}, ("data/format_table.py",), "data/"),
}
ALLOWED = {  # what is no comparison with a row's name, by file and name
    ("hardware/accelerators.py", "trn1"), ("hardware/accelerators.py", "trn2"),  # a device, as its driver calls it
    ("cloud/template.py", "p5"),  # a class of quotas
    ("data/hub_datasets.py", ".md"), ("data/bad_records.py", ".zst"),  # a dataset's card; what a command unpacks
}  # fmt: skip
LOOK_UPS = {"get", "startswith", "endswith", "fromkeys", "pop", "setdefault"}


def compared(tree: ast.AST) -> Iterator[tuple[int, str, ast.AST]]:
    """Every text that code compares, matches, looks up or has as a key, with the line and the whole expression."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                parts = [left, *others]
            case ast.MatchValue(value=value):
                parts = [value]
            case ast.Dict(keys=keys):
                parts = [key for key in keys if key]
            case ast.Subscript(slice=key):
                parts = [key]
            case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if name in LOOK_UPS:
                parts = [first]
            case _:
                continue
        inside = [
            one
            for part in parts
            for one in (part.elts if isinstance(part, ast.Tuple | ast.Set | ast.List) else [part])
        ]
        for part in inside:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.lineno, part.value, node


def is_owner(file: str, owners: tuple[str, ...]) -> bool:
    return any(
        file == owner or (owner.endswith("/") and file.startswith(owner)) for owner in owners
    )


def strangers(file: str, tree: ast.AST) -> Iterator[str]:
    """Where a file compares a name that is a row of a table of another's."""
    for line, word, node in compared(tree):
        for kind, (names, owners, room) in KINDS.items():
            if (
                word in names
                and file.startswith(room)
                and not is_owner(file, owners)
                and (file, word) not in ALLOWED
            ):
                yield f"{file}:{line} compares the {kind} {word}"
        about = isinstance(node, ast.Compare) and re.search(r"\bcause\b", ast.unparse(node))
        if word in CAUSES and about and not file.startswith("watch/"):
            yield f"{file}:{line} compares the cause {word}"


OTHERS = sorted((PACKAGE.parent / "trainfleet_nxd").rglob("*.py"))


def name_of(path: Path) -> str:
    """A file by its path in the package; of another package, with that package's name."""
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else PACKAGE.parent))


@pytest.mark.parametrize("path", [*FILES, *OTHERS], ids=name_of)
def test_nobody_but_its_owner_compares_a_row_s_name(path: Path) -> None:
    assert not list(strangers(name_of(path), ast.parse(path.read_text())))


@pytest.mark.parametrize(
    "code",
    [
        'if train.optimizer == "muon": pass', 'family in ("llama", "gpt2")', 'match kind:\n case "bert": pass', 'X = {"p5.48xlarge": 1}',
        'name.startswith("p5en")', 'sizes["roberta"]', 'row.get("link-cut")', 'verdict.cause == "disk"',
    ],
)  # fmt: skip
def test_the_wall_would_see_it(code: str) -> None:
    assert list(strangers("engine/some.py", ast.parse(code)))
    assert list(strangers("data/some.py", ast.parse('path.endswith((".parquet", ".x"))')))


def test_an_unknown_name_raises() -> None:
    with pytest.raises(KeyError, match="lion"):
        OPTIMIZERS["lion"]
    assert format_of("a/b.docx") is None
    assert {path: row.name for path in ("a.txt.zst", "b.json.zst", "c.zst", "d.tar.gz", "e.json") if (row := format_of(path))} == {
        "a.txt.zst": "packed text", "b.json.zst": "packed lines", "c.zst": "packed lines", "d.tar.gz": "tar", "e.json": "json",
    }  # fmt: skip


def test_what_rows_name_is_there() -> None:
    dotted = [row.made_by for row in OPTIMIZERS.values()] + [
        row.xla for row in OPTIMIZERS.values() if row.xla
    ]
    dotted += [family.module for family in FAMILIES.values()] + [
        row.read for row in FORMATS.values()
    ]
    assert all(callable(named(name)) for name in dotted)


def test_the_schema_has_the_tables_names() -> None:
    keys = load_schema()["properties"]
    assert keys["train"]["properties"]["optimizer"]["enum"] == [*OPTIMIZERS]
    assert keys["model"]["properties"]["family"]["enum"] == [*FAMILIES, None]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"memory_gib": None}, "memory_gib: must be a whole number, not null"),
        ({"memory_gib": -8}, "memory_gib: must be 0 or more, not -8"),
        ({"usd_per_hour": "free"}, "usd_per_hour: must be a finite number"),
        ({"network_gbps": float("nan")}, "network_gbps: must be a finite number"),
        ({"wheels": 4}, "unexpected keyword argument 'wheels'"),
    ],
)
def test_a_row_with_an_absurd_figure_is_refused_with_file_and_line(
    change: dict[str, object], expected: str
) -> None:
    lines = node_types.TABLE.read_text().splitlines()
    line = next(line for line, text in enumerate(lines, 1) if '"p5.48xlarge"' in text)
    row = json.loads(node_types.TABLE.read_text())["types"]["p5.48xlarge"]
    with pytest.raises(InputError) as error:
        node_types.type_of("p5.48xlarge", row | change)
    assert f"instance_types.json:{line}: " in error.value.head and expected in error.value.head
    with pytest.raises(InputError, match=r"missing .* 'vcpus'"):
        node_types.type_of("p5.48xlarge", {name: row[name] for name in row if name != "vcpus"})
