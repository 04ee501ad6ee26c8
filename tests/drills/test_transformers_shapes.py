"""Nine families, two versions of `transformers`, 15 random shapes each: exported there and imported here, logits within 5e-6."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "oracles"))
import transformers_versions as versions

SHAPES = 15
EACH = pytest.mark.parametrize("version", versions.VERSIONS)


@EACH
def test_every_export_gives_the_same_logits_there(version: str, tmp_path: Path) -> None:
    assert versions.exported(version, SHAPES, tmp_path) == []


@EACH
def test_everything_saved_there_gives_the_same_logits_here(version: str, tmp_path: Path) -> None:
    assert versions.imported(version, SHAPES, tmp_path) == []
