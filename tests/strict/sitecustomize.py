"""For the processes that tests start: what has this folder in its PYTHONPATH checks every request to AWS in full (aws/validation.py).

botocore is not loaded for it: its validator is replaced when a program loads it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

VALIDATOR = "botocore.validate"
OURS = Path(__file__).parents[1] / "aws/validation.py"
CODE = compile(OURS.read_bytes(), str(OURS), "exec")


class Strict(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds botocore's validator as Python does, and installs ours once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(name, path) if name == VALIDATOR else None
        if found and found.loader:
            self.plain, found.loader = found.loader, self
        return found

    def exec_module(self, module: ModuleType) -> None:
        self.plain.exec_module(module)
        sys.meta_path.remove(self)
        ours = ModuleType("validation")
        exec(CODE, ours.__dict__)
        ours.install()


sys.meta_path.insert(0, Strict())
