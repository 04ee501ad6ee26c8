"""Loads a user's model from a Python file (model.module) that defines a class `Model` derived from
`Network`, and checks its plan.

The file must be below make's working directory. The schema allows only paths that end in
`_model.py`, without `..`, and outside run and dataset folders. A run folder or checkpoint from
elsewhere therefore can't execute code.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from ..config.types import Model
from ..process.install_paths import page
from ..trust.errors import RunError
from .network import Network


def load(shape: Model) -> Callable[[Model], Network]:
    """Returns the `Model` class from the user's module.

    Raises:
        RunError: the file can't be loaded or does not define the class.
    """
    assert shape.module
    found = getattr(module_at(shape.module, "model.module"), "Model", None)
    if not (isinstance(found, type) and issubclass(found, Network)):
        why = "it must define a class Model that extends trainfleet.models.Network, Llama or GPT2"
        raise RunError(
            "has no class Model",
            where=shape.module,
            why=why,
            next=f"see the example in {page('docs/how-to/own-model.md')}",
        )
    return found


def module_at(path: str, key: str) -> ModuleType:
    """Imports a user's file as a module.

    Raises:
        RunError: the file does not exist or its import fails.
    """
    name = re.sub(r"\W", "_", path)
    spec = importlib.util.spec_from_file_location(name, Path(path).absolute())
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise RunError(
            "does not exist",
            where=path,
            why=f"{key} is relative to the folder in which make runs",
            next=f"ls {path}",
        )
    if (beside := str(Path(path).absolute().parent)) not in sys.path:
        # The file may import modules in its folder. Append, so that they don't shadow packages.
        sys.path.append(beside)
    # torch.compile looks the module up by name.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # user code may raise any exception
        why = f"{type(error).__name__}: {error}"
        raise RunError(
            "can't be loaded", where=path, why=why, next=f"run python {path} to see the full error"
        ) from error
    return module


def check(model: Network, where: str) -> None:
    """Checks that the model's plan matches its modules, before a layout fails on it.

    Raises:
        RunError: the plan is wrong; the message lists all errors.
    """
    if faults := list(_faults(model)):
        why = "; ".join(faults)
        raise RunError(
            "the plan of class Model is wrong",
            where=where,
            why=why,
            next="read trainfleet/models/network.py",
        )


def _faults(model: Network) -> Iterator[str]:
    if not hasattr(type(model), "plan"):
        yield "class Model has no plan"
        return
    plan, names = model.plan, {name for name, _ in model.named_modules()}
    blocks = [name for name in names if re.fullmatch(re.escape(plan.blocks) + r"\.\d+", name)]
    if len(blocks) != model.shape.layers:
        yield (
            f"blocks {plan.blocks!r} has {len(blocks)} modules, but model.layers is "
            f"{model.shape.layers}"
        )
    for field in ("first", "last", "embeddings", "norms", "gathered", "column", "row"):
        for name in getattr(plan, field):
            if not any(
                re.fullmatch(re.escape(name).replace(r"\*", r"\d+"), known) for known in names
            ):
                yield f"{field} names {name!r}, which is not a module of the model"
    prefixes = (*plan.first, *plan.last, plan.blocks)
    for name, _ in model.named_parameters():
        if not name.startswith(tuple(f"{prefix}." for prefix in prefixes)):
            yield f"{name} is not in blocks, first or last"
