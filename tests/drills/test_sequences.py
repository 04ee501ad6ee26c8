"""Sequences of faults, written by hand and drawn from seeds: each run ends trained, equal to the bit, with nothing left anywhere.

SEEDS is how many are drawn (3 if it is not set), FIRST_SEED the first of them: `SEEDS=200 FIRST_SEED=1` is the long drill, and
`SEEDS=1 FIRST_SEED=17` plays the seventeenth again. The groups seeds-failed and seeds-new play those below at one commit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cockpit import Cockpit, pin, told
from fate import (
    ALL,
    BASE,
    EACH,
    GONE,
    HEAD,
    LONG,
    NODES,
    STEP,
    STEPS,
    WORKER,
    Stage,
    Strike,
    draw,
    judge,
    play,
)

import verbs
from fleet.lab import Lab, lab

SEEDS = int(os.environ.get("SEEDS", "3"))
FIRST = int(os.environ.get("FIRST_SEED", "1"))
FAILED = (26, 40, 126, 162, 173)  # each has broken a promise once
NEW = range(201, 221)
DRAWN = [
    *range(FIRST, FIRST + SEEDS),
    *(pytest.param(seed, marks=pytest.mark.thorough, id=f"failed-{seed}") for seed in FAILED),
    *(pytest.param(seed, marks=pytest.mark.thorough, id=f"new-{seed}") for seed in NEW),
]
LONGEST = BASE + 5 * EACH + LONG * STEP + GONE + 30
NEVER = 1000.0  # seconds: until the run is over

WRITTEN = {  # beside what test_heads.py does to heads
    "head frozen for a while": [Strike("frozen", HEAD, 40, lasts=25)],
    "head without power, its locks alive": [Strike("without power", HEAD, 40, lasts=NEVER)],
    "head cut off from all": [Strike("link and disk cut", HEAD, 40, lasts=40)],
    "launchers killed, again and again": [Strike("launcher killed", HEAD, 20, 15) for _ in range(3)],
    "folder stalled": [Strike("folder stalled", ALL, 40, lasts=30)],
    "handles stale on a worker": [Strike("handles stale", WORKER, 40)],
    "handles stale on the head": [Strike("handles stale", HEAD, 40)],
    "folder failing on a worker": [Strike("folder failing", WORKER, 40, lasts=15)],
    "folder failing on the head": [Strike("folder failing", HEAD, 40, lasts=15)],
}  # fmt: skip


@pytest.fixture(scope="module")
def four() -> Iterator[Lab]:
    with lab(4) as nodes:
        verbs.write_text(nodes.shared / "text")
        pin(nodes)
        yield nodes


def steps_of(strikes: list[Strike]) -> int:
    """How long a run with faults that were written by hand trains; one with several has ranks that never stop."""
    return LONG if len(strikes) > 1 else STEPS


@pytest.fixture(scope="module")
def undisturbed(
    four: Lab, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[int, float]:
    """The losses of a run to which nothing happens, as long as the longest that is to be compared with it."""
    names = {
        item.callspec.params.get("name")
        for item in request.session.items
        if hasattr(item, "callspec")
    }
    steps = max([STEPS, *(steps_of(strikes) for name, strikes in WRITTEN.items() if name in names)])
    stage = Stage(
        four,
        Cockpit(four, tmp_path_factory.mktemp("undisturbed"), "undisturbed", nodes=NODES),
        steps=steps,
    )
    stage.cockpit.type("setup")
    play(stage, [])
    losses = stage.cockpit.losses()
    judge(stage, losses)
    assert losses.keys() >= {1, STEPS, steps}
    return losses


@pytest.fixture
def stage(four: Lab, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.callspec.id)
    stage = Stage(four, Cockpit(four, tmp_path, f"fate-{name}", nodes=NODES))
    yield stage
    stage.end()


@pytest.mark.timeout(LONGEST)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_run_outlives(name: str, stage: Stage, undisturbed: dict[int, float]) -> None:
    stage.steps = steps_of(WRITTEN[name])
    seconds = play(stage, WRITTEN[name])
    judge(stage, undisturbed)
    assert len(stage.struck) == len(WRITTEN[name]), "each of them had somebody to strike"
    verdicts = ", ".join(
        f"{verdict['who']}: {verdict['cause']}" for verdict in stage.cockpit.events("verdict")
    )
    told(f"{name} ({seconds:.0f} s)", None, None, None, "equal", verdicts)


@pytest.mark.timeout(LONGEST)
@pytest.mark.parametrize("seed", DRAWN)
def test_a_run_outlives_what_a_seed_draws(
    seed: int, stage: Stage, undisturbed: dict[int, float], tell: Callable[[str], None]
) -> None:
    drawn = draw(seed)
    print(f"seed {seed}:", *drawn, sep="\n  ")
    began = time.time()
    play(stage, drawn)
    judge(stage, undisturbed)
    tell(
        f"seed {seed}: {len(stage.struck)} of {len(drawn)} faults struck, {stage.typed} typed, {time.time() - began:.0f} s"
    )
