"""A backend that the metadata beside this file offers by an entry point: nodes that this machine plays, under another name.

Its bench is the one of that machine: nothing of how such nodes are started has another name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainfleet.backends.local import Local


class Meadow(Local):
    name = "meadow"


def bench(folder: Path, cases: Any) -> Iterator[Any]:
    import pytest  # is not there where the program is used

    here = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", here, prepend=os.pathsep
        )  # an installer would leave it among the packages
        for made in cases.on_this_machine(folder, patch):
            yield replace(made, name=Meadow.name, config=cases.config_of(Meadow.name, folder))
