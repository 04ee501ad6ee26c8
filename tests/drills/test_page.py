"""report.html and the page of all runs in a real headless Chromium: nothing on their consoles, no text on other text, nothing
beyond the window's edges; and all that the page of all runs is clicked and dragged for."""

from __future__ import annotations

import html as markup
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from drills.browser import Browser
from requirement import need_program
from trainfleet.report import all_runs, html
from trainfleet.report.server import Server
from unit.report_runs import make_run

LOOK = """<script>
addEventListener("load", () => {
  document.querySelectorAll("details").forEach(fold => fold.open = true);
  const boxes = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.textContent.trim();
    if (!text || walk.currentNode.parentElement.closest("style, script, title, defs")) continue;
    const range = document.createRange();
    range.selectNodeContents(walk.currentNode);
    for (const r of range.getClientRects()) if (r.width > 0.5) boxes.push([r.left, r.top, r.right, r.bottom, text.slice(0, 40)]);
  }
  const over = [];
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => {
    const wide = Math.min(a[2], b[2]) - Math.max(a[0], b[0]), high = Math.min(a[3], b[3]) - Math.max(a[1], b[1]);
    if (wide > 1.5 && high > 3.5) over.push([a[4], b[4]]);
  }));
  const outside = boxes.filter(b => b[0] < 0 || b[2] > innerWidth + 1).map(b => b[4]);
  const found = {boxes: boxes.length, over, outside, width: innerWidth};
  document.body.innerHTML = "";
  document.body.append("FOUND " + JSON.stringify(found) + " END");
});
</script>"""


def chromium(page: Path, width: int, dark: bool, profile: Path) -> tuple[str, list[str]]:
    """The page's document once it has loaded, and what its console says."""
    program = need_program("chromium", "apt-get install -y --no-install-recommends chromium")
    words = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
             f"--window-size={width},2000", "--enable-logging=stderr", "--dump-dom",
             f"--blink-settings=preferredColorScheme={0 if dark else 1}", page.as_uri()]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def look(page: Path, width: int, dark: bool, profile: Path) -> dict[str, list[object]]:
    """What a script sees in a copy of the page; the page itself lets no script run."""
    text = re.sub(
        r'<meta http-equiv="(Content-Security-Policy|refresh)"[^>]*>', "", page.read_text()
    )
    copy = page.with_name("copy.html")
    copy.write_text(text.replace("</body>", f"{LOOK}</body>"))
    shown, _ = chromium(copy, width, dark, profile)
    found = re.search("FOUND (.*?) END", markup.unescape(shown), re.DOTALL)
    assert found, shown[-2000:]
    return dict(json.loads(found[1]))


STATES = {
    "finished": {},
    "running": {"status": "running", "done": 140, "unattended": True},
    "failed": {"status": "failed", "done": 310},
    "one step": {"status": "stopped", "done": 1, "every": 1},
}


@pytest.mark.parametrize("state", STATES)
def test_a_page_reads_well_at_every_width(state: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, name="a-run-with-a-long-name", **STATES[state])
    if state == "failed":  # as many breaks as are named, next to each other
        for step, kind in (
            (300, "fault"),
            (300, "restarted"),
            (301, "resumed"),
            (305, "stopped"),
            (306, "resumed"),
        ):
            run.record(
                kind, step=step, cause="memory", who="rank 1", message="out of memory", attempt=2
            )
    page = html.write(run)
    assert chromium(page, 1200, False, tmp_path / "profile")[1] == []
    for width, dark in ((1200, False), (1200, True), (520, False)):
        found = look(page, width, dark, tmp_path / "profile")
        assert found["over"] == [] and found["outside"] == [], (state, width, found)
        assert int(found["boxes"]) > 60  # type: ignore[call-overload]


def test_the_look_sees_text_on_text_and_beyond_the_edge(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<body><p>one text</p><p style="margin-top:-30px">another</p><p style="margin-left:3000px">far</p></body>'
    )
    found = look(page, 1200, False, tmp_path / "profile")
    assert found["over"] == [["one text", "another"]] and found["outside"] == ["far"]


RUNS, POINTS = 300, 20_000  # the page shows at most that many rows at first
# Texts of the header and of the curves that lie on each other, or beyond the window.
CROWDED = """(() => {
  const boxes = [], found = [];
  for (const text of document.querySelectorAll("body > header *, #side h2, #side button, #side li > *, svg text")) {
    const r = text.getBoundingClientRect();
    if (text.children.length === 0 && text.textContent.trim() && r.width > 1) boxes.push([r.left, r.top, r.right, r.bottom, text.textContent]);
  }
  boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => {
    if (Math.min(a[2], b[2]) - Math.max(a[0], b[0]) > 1.5 && Math.min(a[3], b[3]) - Math.max(a[1], b[1]) > 4) found.push([a[4], b[4]]);
  }));
  return [found, boxes.filter(b => b[0] < 0 || b[2] > innerWidth + 1).map(b => b[4]), document.documentElement.scrollWidth - innerWidth];
})()"""
ROWS = "document.querySelectorAll('tbody tr').length"
FIRST = "document.querySelector('tbody tr label').textContent"


@pytest.fixture(scope="module")
def all_of_them(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a page of many runs, whose long metrics are one file."""
    root = tmp_path_factory.mktemp("many") / "runs"
    for number in range(RUNS - 2):
        status = "failed" if number % 7 == 3 else "finished"
        run = make_run(
            root,
            name=f"run-{number:03d}",
            done=5,
            status=status,
            usd=number * 1.5,
            nodes=1 + number % 8,
            total_steps=POINTS,
        )
        run.metrics.unlink()
        if not number:
            lines = ({"step": step, "loss": 9 - 7 * step / POINTS, "grad_norm": 30 if step == 5_000 else 1.0, "lr": 1e-3,
                      "tokens_per_second": 1e6, "tokens": step * 4096, "span": 0.5} for step in range(1, POINTS + 1))  # fmt: skip
            run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            os.link(root / "run-000/metrics.jsonl", run.metrics)
    make_run(root, name="<img src=x onerror=alert(1)>", done=20)
    other = (
        root.with_name("the-runs-of-a-colleague-in-a-folder-with-a-name-of-some-length") / "runs"
    )
    make_run(other, name="begins", done=0, status="running", unattended=True)
    pages = all_runs.AllRuns(root, [str(other), f"{other}-that-are-gone"])
    pages.runs()  # as make watch does before a user has opened its address
    server = Server(all_runs.page, 0, pages.routes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.link
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.mark.parametrize(
    ("width", "dark"), [(1440, False), (1440, True), (390, False), (390, True)]
)
def test_the_page_of_all_runs_reads_well(
    browser: Browser, all_of_them: str, width: int, dark: bool, tmp_path: Path
) -> None:
    browser.show(width, dark=dark)
    browser.open(all_of_them)
    browser.wait(f"{ROWS} === {RUNS}")
    browser.eval("document.querySelector('tbody tr label').click()")
    for name in ("run-000", "run-003", "run-297"):
        browser.click(f"#run-{name}")
    browser.wait("document.querySelectorAll('figure:not([hidden]) .curve').length >= 12")
    browser.picture(tmp_path / "page.png")
    assert browser.eval(CROWDED) == [[], [], 0]
    assert browser.eval("document.querySelector('#trouble').innerText").endswith(
        "-that-are-gone: is not a readable folder"
    )
    paper = browser.eval("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert browser.said == []
    browser.click("#clear")


def test_the_list_is_there_in_a_second_and_sorts_and_filters(
    browser: Browser, all_of_them: str
) -> None:
    browser.show(1440)
    browser.open(all_of_them)
    browser.wait(f"{ROWS} === {RUNS}")
    painted = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    listed = "performance.getEntriesByType('resource').find(one => one.name.endsWith('/runs.json')).responseEnd"
    assert browser.eval(painted) < 1000 and browser.eval(listed) < 1000
    browser.click("th.usd button")
    assert (
        browser.eval(FIRST) == "run-297"
        and browser.eval("document.querySelector('th.usd').ariaSort") == "descending"
    )
    browser.click("th.name button")
    assert browser.eval(FIRST) == "<img src=x onerror=alert(1)>"
    search = "(word => { const box = document.querySelector('#filter'); box.value = word; box.oninput(); })"
    browser.eval(f"{search}('run-00 failed')")
    assert browser.eval(ROWS) == 1 and browser.eval(FIRST) == "run-003"
    browser.eval(f"{search}('starting')")
    assert browser.eval(FIRST) == "begins"
    browser.eval(f"{search}('')")
    assert browser.said == []


def test_curves_have_values_under_the_cursor_and_are_magnified(
    browser: Browser, all_of_them: str
) -> None:
    browser.show(1440)
    browser.open(all_of_them)
    browser.wait(f"{ROWS} === {RUNS}")
    browser.click("#run-run-001")
    browser.wait("document.querySelectorAll('figure:not([hidden]) .curve').length >= 4")
    left, top, width, height = browser.eval(
        "(r => [r.left, r.top, r.width, r.height])(document.querySelector('svg').getBoundingClientRect())"
    )
    middle = left + 46 + (width - 54) / 2
    browser.mouse("Moved", middle, top + height / 2)
    tip = browser.eval("document.querySelector('.tip').innerText")
    assert re.search(r"^Step (9,9|10,0)\d\d\s+run-001\s+5\.\d{3}$", tip), tip
    browser.mouse("Pressed", middle, top + 80, button="left", clickCount=1)
    browser.mouse("Moved", middle + 30, top + 80, button="left", buttons=1)
    browser.mouse("Released", middle + 30, top + 80, button="left", clickCount=1)
    browser.wait("close.size === 1")  # more points of this part have come
    steps = browser.eval("[...close.values()][0].loss[0]")
    assert 9_900 < steps[0] < steps[-1] < 13_000 and len(steps) > 900
    browser.eval("document.querySelector('svg').focus()")
    browser.key("Escape")
    assert browser.eval("range === null && document.querySelector('#whole').hidden")
    browser.click("figure header button")
    assert (
        browser.eval("document.querySelector('figure header button').getAttribute('aria-pressed')")
        == "true"
    )
    for axis, last in (
        ("Tokens", "tokens"),
        ("Time", "training time"),
        ("Dollars", "cost, spread evenly over the training time"),
    ):
        browser.eval(
            f"[...document.querySelectorAll('fieldset label')].find(one => one.textContent === '{axis}').click()"
        )
        assert (
            browser.eval(
                "[...document.querySelectorAll('svg text')].map(one => one.textContent)"
            ).count(last)
            == 4
        )
    assert browser.eval("document.querySelectorAll('figure:not([hidden]) .curve').length") >= 4
    assert browser.said == []
