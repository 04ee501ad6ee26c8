"""What NxD's source imports of AWS's closed packages, as far as training on Trn1 touches it: names that can be imported, and no more.

The kernels, the compiler and the runtime behind these names are never called by what is checked here; where one is, it raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

CLOSED = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib")


class Absent:
    """A name of a closed package: it can be imported, subclassed, subscripted and used as a decorator, and not called for a result."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments = arguments

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else Absent()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent()

    def __getitem__(self, key: Any) -> Any:
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)


class Pairs:
    """Collectives' partners in a ring, as neuronxcc's CollectivesConfig tells them: for ring attention, which is not checked."""

    def __init__(self, replica_groups: Sequence[Sequence[int]]) -> None:
        ranks = [rank for group in replica_groups for rank in group]
        self.rank_src_tgt_pairs: dict[int, Any] = {rank: [] for rank in ranks}


class Package(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get_platform_target":
            return lambda: "trn1"
        return Pairs if name == "CollectivesConfig" else Absent()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.split(".")[0] in CLOSED
            else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def install() -> None:
    """Makes the closed packages' names importable; torch's classes of libtorchneuron too."""
    import torch

    sys.meta_path.insert(0, Finder())
    torch.classes.neuron = types.SimpleNamespace(
        SPMDModel=Absent, LayoutTransformation=Absent, Model=Absent
    )
