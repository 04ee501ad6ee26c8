"""Whatever a host answers is believed or Implausible: no other error, by answers grown from true ones and from nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainfleet.config.host_list import Host
from trainfleet.hosts import host_commands
from trainfleet.hosts.facts import parse
from trainfleet.hosts.head import public_key
from trainfleet.hosts.host_results import Implausible, fitted
from trainfleet.hosts.mirror import _mirrored, read_listing
from trainfleet.hosts.preflight import read_bandwidth
from trainfleet.storage.sync_rules import limit
from trainfleet.trust.errors import BackendError
from unit.test_mirror_lies import NAMES, listed
from unit.test_nodes_facts import P3DN

READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "mirror": (lambda text: _mirrored(read_listing(text)[0]), listed({"results.json": 9, "metrics.jsonl": 8, "stop": 0})),
    "facts": (parse, P3DN),
    "job": (host_commands.read_look, "ended 137\n"),
    "bandwidth": (lambda text: read_bandwidth(text, 2), '{"bandwidth": 1.5, "bytes": 8, "nodes": 2, "pairs": [[0, 1, 2.5]]}'),
    "measures": (lambda text: host_commands.read_measures(text, ["runs/x"]), "4096\truns/x\n"),
    "key": (lambda text: public_key(Host("a", "a"), text), "ssh-ed25519 " + "A" * 68 + " trainfleet head a\n"),
    "json": (partial(fitted, dict[str, Any]), '{"a": [1, 2.5, null, true, "x"]}'),
}  # fmt: skip
ODD = [
    "",
    "\0",
    "\n",
    "\r",
    "\x1b[2J",
    "\u202e",
    "\u0663",
    "\ud800",
    "NaN",
    "Infinity",
    "-1",
    "1e999",
    "9" * 400,
    "[" * 500,
    '"',
    "\\",
    "{}",
    "null",
    "=",
    ",",
]
FUZZ = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_subnormal=False) | st.text(max_size=20) | st.sampled_from(NAMES),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8) | st.sampled_from(NAMES), inner, max_size=5), max_leaves=25,
)  # fmt: skip


def believe(reader: str, text: str) -> Any:
    """What the reader makes of a text; None when it is refused as it should be."""
    try:
        return READERS[reader][0](text)
    except (Implausible, BackendError) as error:
        assert len(str(error)) < 600
        return None


def grown(text: str, chance: random.Random) -> str:
    """The text with a few parts cut, doubled, swapped or replaced by something odd."""
    for _ in range(chance.randint(1, 4)):
        start = chance.randint(0, len(text))
        end = min(len(text), start + chance.choice((0, 1, 3, 20)))
        part = chance.choice(
            (
                chance.choice(ODD),
                text[start:end] * 2,
                "",
                text[start:end][::-1],
                chr(chance.randint(0, 0x2FFF)),
            )
        )
        text = text[:start] + part + text[end:]
    return text


@pytest.mark.parametrize("reader", READERS)
def test_a_true_answer_that_has_changed_is_believed_or_untrue(reader: str) -> None:
    assert believe(reader, READERS[reader][1]) is not None
    for seed in range(300):
        believe(reader, grown(READERS[reader][1], random.Random(seed)))


@pytest.mark.parametrize("reader", READERS)
@settings(FUZZ, max_examples=40)
@given(text=st.text(max_size=200))
def test_any_text_is_believed_or_untrue(reader: str, text: str) -> None:
    believe(reader, text)


@settings(FUZZ, max_examples=60)
@given(
    files=st.dictionaries(
        st.sampled_from([*NAMES, "results.json", "stop"]) | st.text(), st.integers(), max_size=3
    )
)
def test_any_files_of_the_mirror_are_believed_or_untrue(files: dict[str, int]) -> None:
    found = believe("mirror", listed(files))
    assert found is None or all(state.size <= (limit(name) or 0) for name, state in found.items())


@settings(FUZZ, max_examples=60)
@given(record=JSON)
def test_any_measurement_is_believed_or_untrue(record: Any) -> None:
    believe(
        "bandwidth", json.dumps({"bandwidth": record, "bytes": record, "nodes": 2, "pairs": record})
    )
