"""Hypothesis on what checkpoints and datasets say of themselves: any bytes and any values are a record or an error with its place.

The same for configs and SET is in test_foreign_sample.py, for hosts in test_foreign_answers.py, for orders in test_foreign_orders.py.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreign.folders import template
from trainfleet.checkpoints import index
from trainfleet.checkpoints.marker import FileSum, parse
from trainfleet.config import load_resolved
from trainfleet.data.manifest import read_manifest, read_preparation
from trainfleet.storage.files import LocalFiles
from trainfleet.trust.errors import TrainfleetError

FUZZ = settings(max_examples=25, deadline=None, derandomize=True, database=None,
                suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_subnormal=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12,
)  # fmt: skip
OLD = Path(__file__).parent / "old_checkpoint"
MARKER = json.loads((OLD / "step-00000004/committed.json").read_text())["commit"]
INDEX = json.loads((OLD / "step-00000004/index.json").read_text())
FILES = {name: FileSum(**file) for name, file in MARKER["files"].items()}


def changed(record: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The record with a few keys of other values, left out or put in."""
    values = st.dictionaries(
        st.sampled_from(sorted(record)) | st.text(max_size=6), JSON, max_size=3
    )
    lost = st.sets(st.sampled_from(sorted(record)), max_size=1)
    return st.builds(
        lambda new, gone: {key: value for key, value in (record | new).items() if key not in gone},
        values,
        lost,
    )


def read(look: Callable[[], object], *places: str) -> bool:
    """Whether it was taken; what is not names its place."""
    try:
        look()
    except TrainfleetError as error:
        assert any(place in str(error) for place in places), error
        return False
    return True


@FUZZ
@given(record=changed(MARKER))
def test_any_marker_is_a_commit_or_refused(record: dict[str, Any]) -> None:
    body = json.dumps(record, indent=1)
    read(
        lambda: parse(
            f'{{"crc32": "{zlib.crc32(body.encode()):08x}",\n"commit": {body}}}\n', "step-4"
        ),
        "step-4",
    )


@FUZZ
@given(record=changed(INDEX) | JSON)
def test_any_json_is_an_index_or_none(record: object) -> None:
    with suppress(ValueError):
        for tensor in index.parse(json.dumps(record).encode(), FILES).values():
            assert all(0 <= piece.begins < FILES[piece.file].size for piece in tensor.pieces)


@pytest.mark.parametrize("name", ["manifest.json", "plan.json"])
@FUZZ
@given(data=st.data())
def test_any_manifest_is_one_or_refused(name: str, data: st.DataObject, tmp_path: Path) -> None:
    record = json.loads((template() / "data/small" / name).read_text())
    (tmp_path / name).write_text(json.dumps(data.draw(changed(record))))
    store = LocalFiles(tmp_path)
    read(lambda: read_manifest(store) if name == "manifest.json" else read_preparation(store), name)


@FUZZ
@given(data=st.data())
def test_any_config_of_a_run_is_one_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    record = yaml.safe_load((template() / "runs/first-run/config.yaml").read_text())
    part = data.draw(
        st.sampled_from(sorted(key for key, value in record.items() if isinstance(value, dict)))
    )
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(record | {part: data.draw(changed(record[part]))})
    )
    read(lambda: load_resolved(tmp_path / "config.yaml"), "config.yaml")
