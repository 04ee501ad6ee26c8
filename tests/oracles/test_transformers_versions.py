"""Both versions of `transformers` and we agree on what a folder means: a few random shapes a family, and each key of config.json.

All 15 shapes are in tests/drills/test_transformers_shapes.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers_versions as versions

EACH = pytest.mark.parametrize("version", versions.VERSIONS)


@EACH
def test_an_export_gives_the_same_logits_in_every_version(version: str, tmp_path: Path) -> None:
    assert versions.exported(version, 4, tmp_path) == []


@EACH
def test_what_every_version_saves_gives_the_same_logits_here(version: str, tmp_path: Path) -> None:
    assert versions.imported(version, 4, tmp_path) == []


@EACH
def test_no_key_that_changes_the_function_is_passed_over(version: str, tmp_path: Path) -> None:
    assert versions.unseen_keys(version, tmp_path) == []
