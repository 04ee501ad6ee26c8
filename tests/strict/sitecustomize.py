"""For the processes that tests start: what has this folder in its PYTHONPATH checks every request to AWS in full (aws/validation.py).

botocore is not loaded for it: its validator is replaced when a program loads it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

VALIDATOR = "botocore.validate"


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
        spec = importlib.util.spec_from_file_location("validation", Path(__file__).parents[1] / "aws/validation.py")
        assert spec and spec.loader
        validation = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(validation)
        validation.install()


sys.meta_path.insert(0, Strict())
