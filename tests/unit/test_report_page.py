"""report.html and the plots, of run folders as training leaves them: whole, short, broken, hostile."""

from __future__ import annotations

import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import SAMPLE, START, make_run, metric

from trainfleet.health import fence
from trainfleet.health.heartbeat_format import Beat, write_beats
from trainfleet.health.lease import Launching, show_launching
from trainfleet.report import html, live, panels, plots
from trainfleet.report.history import clock, duration, moment, quantity, read
from trainfleet.report.summary import status
from trainfleet.run.run_folder import Run, append_line

VOID = {"meta", "br", "i", "path", "use"}


class Page(HTMLParser):
    """A page's text and the tags that were opened and not closed; whatever it would fetch from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        self.fetched += [
            value
            for name, value in attrs
            if name in ("src", "href", "xlink:href") and value and value[0] != "#"
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(run: Run) -> Page:
    return Page(html.write(run).read_text())


def test_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    shown = page(run)
    assert shown.open == [] and shown.fetched == []
    assert "url(http" not in run.report.read_text() and "@import" not in run.report.read_text()
    for expected in (
        "first-run",
        "finished",
        "median 17.3k",
        "2.780",
        "2.900",
        "2.05M",
        "17.3k",
        "31.2 %",
        "76.1 %",
        "30 s",
        "learning_rate: 0.003",
        "MFU = tokens/s x FLOPs per token",
    ):
        assert expected in shown.text
    assert SAMPLE["prompt"] + SAMPLE["text"] in shown.text
    assert re.search(r"Rank 1 is the slowest in \d+ % of the steps", shown.text)
    assert "<details><summary>" in run.report.read_text().partition("Resolved config")[2], (
        "it is folded"
    )
    assert (
        run.report.read_text().count("<svg ") == 2 + 5
        and 'http-equiv="refresh"' not in run.report.read_text()
    )


def test_the_page_of_a_run_that_trains_reads_itself_anew_and_says_who_is_slow(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, done=40, status="running", unattended=True)
    beats = [
        Beat(rank, rank, 7, 0, "step", 40, 0.1, time.time(), 0.5, busy)
        for rank, busy in enumerate((0.2, 0.4))
    ]
    for beat in beats:
        write_beats(run.folder, beat.node, 0, [beat])
    shown = page(run)
    assert '<meta http-equiv="refresh" content="15">' in run.report.read_text()
    assert shown.text.index("rank 1node 1step 40") < shown.text.index("rank 0node 0step 40")


def test_before_its_first_step_the_page_says_what_the_slowest_rank_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, done=0, status="running", unattended=True)
    assert "starting ranks" in page(run).text and "running · starting ranks" in status(run)
    monkeypatch.setattr(fence, "TO_LEAVE", 0.0)
    order = fence.begin(run.folder)
    assert fence.enter(run.folder, order) == order, "and once more, after a scheduler's requeue"
    number = fence.enter(run.folder, order)
    for rank, phase in enumerate(("step", "load")):
        write_beats(run.folder, rank, number, [Beat(rank, rank, 7, 0, phase, 1, 12.0, time.time())])
    assert "loading model and data for 12 s" in page(run).text
    assert "running · loading model and data for 12 s\n" in status(run)
    launched = Run(tmp_path / "launched")
    show_launching(launched, Launching("make train, typed by me", 1, "1"), obeyed=False)
    assert read(launched).phase == "being launched: make train, typed by me"


def test_the_start_is_the_first_start_and_versions_and_own_keys_are_told(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        started=START + 9000,
        versions={"trainfleet": "0.2.0 (1a2b3c4)", "torch": "2.13.0"},
    )
    events = "".join(
        json.dumps({"time": START + add, "event": "launched", "started": START + add}) + "\n"
        for add in (0, 9000)
    )
    (run.events / "node-0-1.jsonl").write_text(events)
    run.given.write_text("train: {steps: 77, seed: 1}\nfleet: {nodes: 3}\n")
    text = page(run).text
    assert text.count(moment(START)) == 2 and "trainfleet 0.2.0 (1a2b3c4), torch 2.13.0" in text
    assert "train.steps77" in text and "fleet.nodes3" in text and "train.seed1" not in text


def test_a_loss_that_rose_is_remarked_on_and_one_that_fell_is_not(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=60)
    assert read(run).rose == "" and "rose" not in page(run).text
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    run.metrics.write_text(
        "".join(
            json.dumps(line | {"loss": 7.7 if line["step"] == 5 else 193.0}) + "\n"
            for line in lines
        )
    )
    assert "The loss rose from 7.700 to 193.000" in page(run).text and "rose" in status(run)


def test_a_page_is_drawn_while_the_run_trains_and_only_when_there_is_something_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, done=20, status="running", unattended=True)
    monkeypatch.setattr(live, "FIRST", 0.0)
    monkeypatch.setattr(live, "EVERY", 0.0)
    pages = live.Refresh(run)
    pages.look()
    first = pages.process
    assert first and first.wait(60) == 0 and "20 of 500 steps" in run.report.read_text()
    pages.look()
    assert pages.process is first  # no new line
    append_line(run.metrics, metric(25, 500))
    pages.look()
    assert pages.process is not first
    pages.close()
    assert pages.process and pages.process.poll() is not None


def test_svg_takes_its_colours_from_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    drawn = plots.svg(plots.figures(read(run))["loss"], "loss")
    page_text = html.PAGE.read_text()
    named = set(re.findall(r"var\((--\w+)\)", drawn))
    assert {"--blue", "--red", "--ink", "--faint", "--grid"} == named
    assert all(page_text.count(f"{name}:") == 2 for name in named)  # light and dark
    assert not re.search(r"(?:fill|stroke): #(?!ffffff)[0-9a-f]{6}", drawn)


def test_the_way_to_the_first_step_is_told(tmp_path: Path) -> None:
    text = html.write(make_run(tmp_path)).read_text()
    assert (
        "torch was loaded after 25 s, ranks were connected after 26 s, the model was built after 27 s"
        in text
    )


def test_text_from_outside_is_escaped(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, status="failed", sample={"prompt": "<script>a()</script>", "text": "<b>&"}
    )
    run.record("fault", rank=0, node=0, message="<img src=x>", traceback=["<i>"])
    run.record("resumed", by="<u>")
    run.config.write_text(
        "name: x\ndata: {sources: ['<script>b()</script>']}\nodd: <script>c()</script>\n"
    )
    text = run.report.read_text() if page(run) else ""
    assert not re.search(r"<script|<img|<b>&|<u>|<i>", text)
    assert (
        "&lt;script&gt;a()" in text and "&lt;script&gt;b()" in text and "&lt;img src=x&gt;" in text
    )
    assert "c()" not in text, "of the file there is what was understood, and not a byte else"


def test_verdict_heads_a_failed_page_and_no_other(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=0, status="failed")
    run.record("fault", rank=0, node=0, message="of an earlier attempt")
    run.record("launched", nodes=2)
    run.record(
        "fault",
        rank=3,
        node=1,
        message="shard 3 is short",
        why="disk",
        traceback=["line a", "line b"],
    )
    run.record("fault", rank=0, node=0, message="connection closed")
    shown = page(run)
    head = shown.text[: shown.text.index("Next")]
    assert "rank 3 on node 1: shard 3 is short" in head and "why: disk\nline a\nline b" in head
    assert "earlier" not in head and "closed" not in head
    assert plots.draw(run) == [] and "<svg" not in run.report.read_text()
    run.update_results(status="finished")
    assert 'class="verdict"' not in html.write(run).read_text()


@pytest.mark.parametrize(
    "lost",
    [
        "loss",
        "valid_loss",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("mfu", "tokens_per_second", "tokens")
        ),
    ],
)
def test_missing_measurement_leaves_the_rest(tmp_path: Path, lost: str) -> None:
    run = make_run(tmp_path, steps=40, every=1)
    lines = [
        {key: value for key, value in metric(step, 40).items() if key != lost}
        for step in range(1, 41)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.update_results(
        final_loss=None,
        mfu=None,
        tokens_per_second=None,
        tokens=None,
        goodput=None,
        seconds=None,
        model=None,
    )
    assert len(plots.draw(run)) == 2
    assert page(run).open == []


def test_empty_folder_makes_a_page(tmp_path: Path) -> None:
    run = Run(tmp_path / "empty")
    shown = page(run)
    assert "not started" in shown.text and "make train" in shown.text


def test_one_step_and_broken_loss_are_drawn(tmp_path: Path) -> None:
    one = make_run(tmp_path, name="one", steps=1)
    assert [path.stat().st_size > 10_000 for path in plots.draw(one)] == [True, True]
    broken = make_run(tmp_path, name="broken", steps=60, every=1)
    for step in (61, 62):
        append_line(broken.metrics, metric(step, 62) | {"loss": math.nan})
    assert read(broken).broke_at == 61
    assert "The loss became NaN or infinite at step 61" in page(broken).text
    assert len(plots.draw(broken)) == 2


def test_smoothing_begins_and_ends_on_the_data_and_keeps_a_line_straight() -> None:
    line = [3.0 * x for x in range(200)]
    assert plots._smooth(line) == pytest.approx(line)
    assert plots._smooth([5.0, *line, 9.0])[::201] == pytest.approx([5.0, 9.0])


@pytest.mark.parametrize("key, name", [("lr", "rate"), ("grad_norm", "norm")])
def test_a_schedule_and_a_norm_are_drawn_as_they_were_logged(
    tmp_path: Path, key: str, name: str
) -> None:
    history = read(make_run(tmp_path, steps=400, every=1))
    assert len(history.series(key)[1]) > 50
    drawn = panels.panels(history)[name].axes[0].lines
    curves = [
        (list(one.get_xdata()), list(one.get_ydata())) for one in drawn if len(one.get_xdata()) > 2
    ]  # type: ignore[arg-type]
    assert curves == [history.series(key)], "and no mean over it"


def test_step_done_twice_counts_as_done_last(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=10, every=1)
    append_line(run.metrics, metric(4, 10) | {"loss": 1.25})
    steps, losses = read(run).series("loss")
    assert steps == list(range(1, 11)) and losses[3] == 1.25


def test_numbers_read_well() -> None:
    assert [quantity(one) for one in (0, 7, 999, 999.96, 12_400, 3_212_544, 8.03e9, None)] == [
        "0", "7", "999", "1k", "12.4k", "3.21M", "8.03B", "—",
    ]  # fmt: skip
    assert [duration(one) for one in (0.42, 9.96, 59.6, 192, 7500, 273_600, None)] == [
        "0.42 s", "10 s", "1 min 00 s", "3 min 12 s", "2 h 05 min", "3 d 04 h", "—",
    ]  # fmt: skip
    assert [clock(one) for one in (14, 723, 7544, None)] == ["0:14", "12:03", "2:05:44", "—"]


@pytest.mark.parametrize("dark", [False, True])
def test_every_colour_of_words_can_be_read(dark: bool) -> None:
    """WCAG 2.2, 1.4.3: a contrast of 4.5 with what is behind, here the page; faint words are on cards too."""
    light, night = re.findall(r":root \{ [^}]*--ink[^}]*\}", html.PAGE.read_text())
    colours = dict(re.findall(r"--(\w+): (#\w+)", night if dark else light))

    def luminance(name: str) -> float:
        digits = (
            colours[name][1:]
            if len(colours[name]) == 7
            else "".join(2 * digit for digit in colours[name][1:])
        )
        parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    words = [(name, "paper") for name in ("ink", "faint", "blue", "red", "good", "warn", "bad")]
    for pair in [*words, ("ink", "card"), ("faint", "card")]:
        low, high = sorted(luminance(name) for name in pair)
        assert (high + 0.05) / (low + 0.05) >= 4.5, pair
