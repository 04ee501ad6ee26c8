"""What searches led by coverage have found (tests/fuzz): each input that broke a target once, and the inputs they began with."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from fuzz import targets

ARROW = (  # an Arrow file with a column whose name is not UTF-8
    "B0FSUk9XMQAA/////3AAAAAQAAAAAAAKAAwADQAFAAgACgAAAAABBAAM////eyJ0ZXh0IgAAAAAAAAAAAP//AAAAABAAAAAMABQABgAIAAwAEAAMAAAAAAAE"
    "ADQAAAAkAAAABAAAAAEAAACAAAAAAAAAAKAAAAAAAAAAGAAAAAAAAAAAAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQABAAAAAA"
    "AAEFEAAAABwAAAAEAAAAAAAAAAQAAAB0ZdUAAAAAAAQABAAEAAAAmAAAAEFSUk9XMQ=="
)
FINDS = [
    ("answers", b"== facts\nmtu= 5\n== end"),  # a network card without a name
    ("answers", b"== facts\nclock=0999.5N0\n== end"),  # a clock that is almost a time
    (
        "sources",
        b"\t\x1f\x8b\x08\xe4\x00\x00\x00\x8b\xcb\x00\x00",
    ),  # a tar whose gzip header is cut
    ("sources", base64.b64decode(ARROW)),
]


@pytest.fixture(scope="module", autouse=True)
def tidy() -> Iterator[None]:
    yield
    targets.tidy()


@pytest.mark.parametrize(("target", "content"), FINDS)
def test_what_a_search_has_found_is_an_answer_now(target: str, content: bytes) -> None:
    targets.TARGETS[target](content)


@pytest.mark.parametrize("target", targets.TARGETS)
def test_a_search_begins_with_inputs_that_are_taken(target: str) -> None:
    for content in targets.seeds(target):
        targets.TARGETS[target](content)
