"""The events of a run: one table of them that every writer keeps to, and one order that every reader sees."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainfleet.run import records, run_folder
from trainfleet.run.records import Feed, merge
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import RunError
from trainfleet.watch.verdict import Verdict

PACKAGE = Path(records.__file__).parents[1]
EVENTS = yaml.safe_load((PACKAGE / "run/events.yaml").read_text())
WRITERS = ("launcher", "rank 0", "any rank")
TYPES: dict[str, tuple[type, ...]] = {  # by their names in JSON
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list, tuple), "object": (dict,),
    "null": (type(None),),
}  # fmt: skip
# Calls whose event or fields are not written out where they stand, by file; what they record, the tests named there look at.
FREE = {
    "engine/checkpoint/checkpoints.py": "test_checkpoint_policy.py",
    "engine/record.py": "its own callers: below",
    "engine/__main__.py": "test_training.py",
    "data/__main__.py": "test_data_share.py",
    "watch/retry_loop.py": "the verdict: below",
    "watch/node_verdict.py": "the same",
}


def wrong(event: Mapping[str, Any]) -> list[str]:
    """What of a recorded event is not as the table has it."""
    always, known = known_fields(event["event"])
    extra = [
        key
        for key, value in event.items()
        if key not in ("time", "event") and not isinstance(value, known.get(key, ()))
    ]
    return extra + [key for key in always if key not in event]


def known_fields(name: str) -> tuple[set[str], dict[str, tuple[type, ...]]]:
    """The fields that an event always has, and the types of those that it may have."""
    kind = EVENTS[name]
    always, types = kind.get("fields", {}), dict[str, tuple[type, ...]]()
    for key, word in (always | kind.get("optional", {})).items():
        types[key] = sum((TYPES[one] for one in ([word] if isinstance(word, str) else word)), ())
    return set(always), types


def recorded() -> Iterator[tuple[str, ast.Call]]:
    """Every call of a run's `record` in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            whose = ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
            if (
                isinstance(node, ast.Call)
                and isinstance(called, ast.Attribute)
                and (
                    called.attr == "_record"
                    or (called.attr in ("record", "note") and "run" in whose)
                )
            ):
                yield str(path.relative_to(PACKAGE)), node


def test_every_event_that_is_recorded_is_in_the_table_with_its_fields() -> None:
    seen = set()
    for file, call in recorded():
        name = call.args[0]
        if not isinstance(name, ast.Constant) or any(word.arg is None for word in call.keywords):
            assert file in FREE, f"{file}:{call.lineno}"
            continue
        seen.add(name.value)
        always, known = known_fields(name.value)
        assert always <= {word.arg for word in call.keywords} <= known.keys(), (
            f"{file}:{call.lineno}"
        )
    assert len(seen) >= 10


def test_a_verdict_is_recorded_as_the_table_has_it() -> None:
    assert {field.name for field in fields(Verdict)} | {"who", "then"} == EVENTS["verdict"][
        "fields"
    ].keys()
    assert not wrong(
        {"event": "verdict", "time": 1.0}
        | Verdict("nan", "words", 1, None, "host", ("a",), "next").record()
    )


def test_what_was_recorded_comes_back_by_time_and_each_writer_s_in_its_order(
    tmp_path: Path,
) -> None:
    first, rank = Run(tmp_path), Run(tmp_path, records.node(0, 3))
    first.record("launched", nodes=1, ranks_per_node=1)
    rank.record("checkpointed", step=1, seconds=0.1)
    first.record("quarantined", host="a", evidence="b")
    assert [event["event"] for event in first.read_events()] == [
        "launched",
        "checkpointed",
        "quarantined",
    ]
    assert sorted(path.name for path in first.events.iterdir()) == [
        f"{records.launcher()}.jsonl",
        "node-0-3.jsonl",
    ]
    back = [
        {"event": "a", "time": 5.0},
        {"event": "b", "time": 3.0},
        {"event": "c", "time": 7.0},
    ]  # its clock was set back
    assert [event["event"] for event in merge([back, [{"event": "other", "time": 6.0}]])] == [
        "a",
        "b",
        "other",
        "c",
    ]


def test_what_is_no_event_is_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.record("finished", step=1)
    lines = ('{"event": "a"}', '{"time": 1.0}', "[]", "3", "null", '{"event": 1, "time": 1.0}', '{"event": "a", "time": "now"}')  # fmt: skip
    (run.events / "node-0-1.jsonl").write_text("\n".join([*lines, ""]))
    assert [event["event"] for event in run.read_events()] == ["finished"]


def test_a_feed_gives_each_event_once_of_every_writer_also_of_one_that_comes_late(
    tmp_path: Path,
) -> None:
    run, late = Run(tmp_path), Run(tmp_path, records.node(1, 1))
    run.record("launched", nodes=1, ranks_per_node=1)
    whole, new = Feed(tmp_path), Feed(tmp_path, tail=0)
    late.record("finished", step=3)
    assert [event["event"] for event in new.new()] == ["finished"] and not new.new()
    assert [event["event"] for event in whole.new()] == ["launched", "finished"] and not whole.new()


def test_a_host_s_name_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records.platform, "node", lambda: "../../a b")
    Run(tmp_path).record("finished", step=1)
    assert [path.name for path in (tmp_path / "events").iterdir()] == ["launcher-..-..-a-b.jsonl"]


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.update_results(status="running")["format"] == records.FORMAT
    for other in (records.FORMAT + 1, records.FORMAT - 1, "2", None):
        run_folder.write_atomic(run.results, json.dumps({"format": other}))
        with pytest.raises(RunError, match=f"has run folder format {json.dumps(other)}, but"):
            run.read_results()


def test_every_row_says_who_writes_it_and_what_it_tells() -> None:
    for name, kind in EVENTS.items():
        assert kind["by"] in WRITERS and kind["tells"] and known_fields(name) is not None
