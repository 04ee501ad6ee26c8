"""What our code calls of NxD Core, held against the signatures that were recorded from its source: tests/nxd/signatures.json."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE: dict[str, list[str]] = json.loads((ROOT / "tests/nxd/signatures.json").read_text())
FILES = [ROOT / f"python/trainfleet_nxd/{name}.py" for name in ("parts", "layers", "shards")]


def taken(tree: ast.Module) -> set[str]:
    """The names that a file imports from NxD, and the functions that it takes from its modules."""
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("neuronx_distributed")
        for alias in node.names
    }
    modules = {"nxd", "parallel_state"}
    return {name for name in names if name not in modules} | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    }


def calls(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            found.append((name, node))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_call_of_nxd_fits_its_signature(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert taken(tree) <= TABLE.keys()
    for name, call in calls(tree):
        if name not in TABLE or name not in taken(tree) | {"mark_weight_sharing"}:
            continue
        parameters = TABLE[name]
        assert len(call.args) <= len(parameters), f"{path}:{call.lineno}"
        loose = "defaults" in parameters  # **defaults go to the optimizer
        unknown = {keyword.arg for keyword in call.keywords if keyword.arg} - set(parameters)
        assert loose or not unknown, f"{path}:{call.lineno} {name}: {unknown}"


def test_what_nxd_is_told_in_dicts_it_knows() -> None:
    """The pipeline's config becomes NxDPPModel's arguments."""
    text = (ROOT / "python/trainfleet_nxd/layers.py").read_text()
    tree = ast.parse(text)
    keys = {
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    }
    assert keys and keys | {"num_microbatches", "use_zero1_optimizer"} <= set(TABLE["NxDPPModel"])


@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_stand_in_of_ci_has_nxd_s_signatures(name: str) -> None:
    """tests/nxd/standin.py, in which our code is executed: each of its names takes what NxD's takes, in that order."""
    tree = ast.parse((ROOT / "tests/nxd/standin.py").read_text())
    found = {
        node.name: node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    if name == "source":
        return
    node = found[name]
    if isinstance(node, ast.ClassDef):
        node = next(
            each
            for each in node.body
            if isinstance(each, ast.FunctionDef) and each.name == "__init__"
        )
    words = [
        *node.args.posonlyargs,
        *node.args.args,
        node.args.vararg,
        *node.args.kwonlyargs,
        node.args.kwarg,
    ]
    assert [word.arg for word in words if word and word.arg != "self"] == TABLE[name]
