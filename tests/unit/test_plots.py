"""The plots of odd runs: no text lies on a curve or on another text, whatever the curves do; one colour a use of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from report_runs import make_run, metric

import verbs
from trainfleet.report import html, panels, plots, summary
from trainfleet.report.history import read
from trainfleet.run.run_folder import Run, append_line
from trainfleet.watch.time_accounting import USES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def collisions(figure: Figure) -> Iterator[str]:
    """What lies on what in a figure as it is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    FigureCanvasAgg(figure).draw()
    texts = [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()
    ]
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts]
    lines = [
        line for axes in figure.axes for line in axes.get_lines() if line.get_linestyle() == "-"
    ]
    for text, box in boxes:
        if any(
            line.get_transform().transform_path(line.get_path()).intersects_bbox(box, filled=False)
            for line in lines
        ):
            yield f"a curve runs through {text!r}"
    yield from (
        f"{one!r} lies on {other!r}"
        for (one, a), (other, b) in combinations(boxes, 2)
        if a.overlaps(b)
    )


def _lines(run: Run, steps: range, **changed: Any) -> None:
    run.metrics.write_text(
        "".join(
            json.dumps(
                metric(step, steps[-1]) | {key: change(step) for key, change in changed.items()}
            )
            + "\n"
            for step in steps
        )
    )


RUNS: dict[str, dict[str, Any]] = {
    "usual": {},
    "validated long before its end": {"valid_loss": lambda step: 3.2 if step == 100 else None},
    "validated once, at the height of the loss": {
        "valid_loss": lambda step: metric(300, 500)["loss"] if step == 100 else None
    },
    "rises": {"loss": lambda step: 2 + step / 50},
    "falls in a line": {"loss": lambda step: 9 - step / 60},
    "begins slowly": {"tokens_per_second": lambda step: 17000 * min(1, 0.01 + step / 400)},
    "becomes slow": {"tokens_per_second": lambda step: 17000 / (1 + step / 30)},
    "restarted on other hardware": {"mfu": lambda step: 0.3 if step < 250 else 0.6},
    "flat": {"loss": lambda step: 4.0, "tokens_per_second": lambda step: 900.0},
    "jumps": {"loss": lambda step: 3.0 + (step % 7 == 0) * 5.0},
    "two sources": {
        f"valid_loss/{source}": lambda step, loss=loss: loss if step % 50 == 0 else None
        for source, loss in (("web", 3.4), ("code", 2.1))
    },
    "no number from 250 on": {"loss": lambda step: 3.0 if step < 250 else float("nan")},
}


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(range(1, 4), id="3 steps", marks=pytest.mark.thorough),
        pytest.param(range(5, 500, 5), id="500 steps"),
    ],
)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=[pytest.mark.thorough]
            if kind in ("rises", "falls in a line", "flat", "becomes slow")
            else [],
        )
        for kind in RUNS
    ],
)
def test_no_text_lies_on_a_curve_or_on_another_text(
    kind: str, steps: range, tmp_path: Path
) -> None:
    sources = {key.removeprefix("valid_loss/"): 3.0 for key in RUNS[kind] if "/" in key}
    run = make_run(tmp_path, steps=steps[-1], valid_losses=sources)
    _lines(run, steps, **RUNS[kind])
    for step, event in ((2, "resumed"), (260, "fault"), (260, "restarted"), (450, "stopped")):
        if step <= steps[-1]:
            run.record(event, step=step)
    history = read(run)
    for name, figure in plots.figures(history).items():
        assert list(collisions(figure)) == [], (kind, name)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.thorough), 500])
def test_the_smaller_plots_are_as_clear(steps: int, tmp_path: Path) -> None:
    history = read(make_run(tmp_path, steps=steps))
    for name, figure in (plots.figures(history) | panels.panels(history)).items():
        assert list(collisions(figure)) == [], name


def test_a_stack_of_one_step_is_not_drawn(tmp_path: Path) -> None:
    assert "parts" not in panels.panels(read(make_run(tmp_path, name="one", steps=1, every=1)))
    assert "parts" in panels.panels(read(make_run(tmp_path, name="two", steps=2, every=1)))


def test_compared_runs_are_named_beside_their_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, drawn = (40, 200, 500, 500, 120), []
    runs = [
        make_run(
            tmp_path, name=f"a-long-name-of-an-experiment-that-someone-made-number-{i}", steps=end
        )
        for i, end in enumerate(ends)
    ]
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure)
    )
    summary.draw({run.name: run for run in runs}, tmp_path / "compare.png")
    assert list(collisions(drawn[0])) == []
    assert drawn[0].axes[0].get_position().width > 0.4, "the names leave the curves room"
    told = [text.get_text() for text in drawn[0].axes[0].texts]
    assert [
        f"number-{i}" in name
        for i, name in enumerate(sorted(told, key=lambda name: name.split()[0][-1]))
    ] == [True] * 5


def test_a_page_of_ten_thousand_steps_is_no_heavier_than_a_picture(tmp_path: Path) -> None:
    page = html.write(make_run(tmp_path, steps=10_000, every=1))
    assert page.stat().st_size < 800_000


def test_a_run_that_lost_its_loss_is_not_listed_with_the_one_before(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=60, every=1)
    append_line(run.metrics, metric(61, 61) | {"loss": float("nan")})
    assert "nan" in "".join(summary.describe_runs([run])) and ("loss", "nan") in summary._outcomes(
        [read(run)]
    )
    assert "this is the last finite value" in html.write(run).read_text()
    append_line(run.metrics, metric(62, 62))
    assert ("loss", "nan") not in summary._outcomes([read(run)]), "it has found its way back"


def test_a_use_of_time_has_one_colour_in_every_report() -> None:
    assert set(html.COLOURS) == {*USES}
    assert len({html.COLOURS[use] for use in USES}) == len(USES)
    for stages in ({"useful": 3.0, "down": 1.0}, {"compile": 2.0, "down": 1.0}):
        text = html._stages(SimpleNamespace(stages=stages))  # type: ignore[arg-type]
        assert f'<li><i style="background:{html.COLOURS["down"]}"></i>down' in text


@pytest.mark.parametrize("name", [
    "XDG_CACHE_HOME",
    pytest.param("HOME", marks=pytest.mark.thorough),
    pytest.param("MPLCONFIGDIR", marks=pytest.mark.thorough),
])  # fmt: skip
def test_a_folder_that_a_library_may_not_write_is_no_news(name: str) -> None:
    """A ~/.cache that is read-only, no home, and a folder of matplotlib's own: it draws without, and warns of it."""
    line = "from trainfleet.report import plots; import matplotlib as m; print(m.get_configdir(), m.get_cachedir())"
    environment = {"PYTHONPATH": verbs.PACKAGES, "PATH": os.environ["PATH"], "HOME": "/tmp", name: "/proc/none"}  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", line], env=environment, capture_output=True, text=True, check=True
    )
    assert "/proc/none" not in ran.stdout.split()[-1] and not ran.stderr, ran.stderr


@pytest.mark.parametrize("key, name", [("lr", "rate"), ("grad_norm", "norm")])
def test_a_peak_of_a_rate_or_norm_is_drawn_as_it_was(key: str, name: str, tmp_path: Path) -> None:
    """A moving mean would cut off the end of a warm-up and the spike before a loss breaks."""
    run = make_run(tmp_path)
    _lines(run, range(1, 201), **{key: lambda step: 1.0 if step == 100 else 0.1})
    drawn = panels.panels(read(run))[name].axes[0].get_lines()
    assert max(max(curve.get_ydata()) for curve in drawn[:1]) == 1.0  # type: ignore[arg-type]
    assert len(drawn[0].get_ydata()) == 200  # type: ignore[arg-type]
