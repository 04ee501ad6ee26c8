"""report.html in a real headless Chromium: nothing on its console, no text on other text, nothing beyond the window's edges."""

from __future__ import annotations

import html as markup
import json
import re
import subprocess
from pathlib import Path

import pytest

from requirement import need_program
from trainfleet.report import html
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
