"""The page of make watch, asked over real sockets: by its reader, by other users of the machine, and by whoever means it harm."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import s3server
from trainfleet.cli import main as command
from trainfleet.cli.runs import _watched
from trainfleet.cli.runs import served as served_on
from trainfleet.report import all_runs, server
from trainfleet.report.server import MOST, Server
from trainfleet.run.run_folder import Run
from trainfleet.storage.folder_sync import FolderSync
from unit.report_runs import make_run

PAGE = b"<p>the report"


def served(page: Callable[[], bytes] = lambda: PAGE, routes: server.Routes | None = None) -> Server:
    made = Server(page, 0, routes)
    threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
    return made


@pytest.fixture
def page() -> Iterator[Server]:
    made = served()
    yield made
    made.shutdown()
    made.server_close()


def ask(
    page: Server, path: str = "/", **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    link = http.client.HTTPConnection("127.0.0.1", page.server_port, timeout=5)
    link.request("GET", path, headers={"Host": f"127.0.0.1:{page.server_port}", **headers})
    answer = link.getresponse()
    return answer.status, answer.read(), answer.headers


def path_of(page: Server) -> str:
    return page.link.partition(str(page.server_port))[2]


def test_the_page_is_shown_to_who_has_the_token_and_then_to_their_browser(page: Server) -> None:
    assert page.server_address[0] == "127.0.0.1" and re.fullmatch(
        r"/\?token=[\w-]{24}", path_of(page)
    )
    code, text, headers = ask(page, path_of(page))
    cookie = headers["Set-Cookie"]
    assert (code, text) == (200, PAGE) and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert ask(page, "/", Cookie=f"other=1; {cookie.partition(';')[0]}")[:2] == (200, PAGE)


@pytest.mark.parametrize(
    ("path", "cookie"),
    [("/", ""), ("/?token=", ""), ("/?token=%C3%A9%00", ""), ("/", "{}=x"), ("/", "=;;\x01")],
)
def test_without_the_token_nobody_reads_it_and_is_told_what_to_do(
    page: Server, path: str, cookie: str
) -> None:
    code, text, headers = ask(
        page, path, Cookie=cookie.replace("{}", f"trainfleet-{page.server_port}")
    )
    assert (
        code == 403 and PAGE not in text and b"make watch" in text and "Set-Cookie" not in headers
    )


@pytest.mark.parametrize(
    "host", ["evil.example:80", "localhost.evil.example", "[::1]:80", "127.0.0.1:80:80", ""]
)
def test_a_page_that_has_its_name_lead_here_reads_nothing(page: Server, host: str) -> None:
    assert ask(page, path_of(page), Host=host)[0] == 404


@pytest.mark.parametrize("host", ["LocalHost:8000", "LOCALHOST", "127.0.0.1"])
def test_this_machine_has_its_names_in_any_case(page: Server, host: str) -> None:
    assert ask(page, path_of(page), Host=host)[:2] == (200, PAGE)


@pytest.mark.parametrize(
    "path", ["/config.yaml", "/../config.yaml", "/%2e%2e/config.yaml", "//[", "http://127.0.0.1/"]
)
def test_there_is_one_page(page: Server, path: str) -> None:
    assert ask(page, path + path_of(page)[1:])[0] == 404


def test_a_report_that_is_not_there_is_said_in_the_page_and_not_on_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = served((tmp_path / "report.html").read_bytes)
    code, text, _ = ask(page, path_of(page))
    page.shutdown()
    assert code == 503 and b"make report" in text and "".join(capfd.readouterr()) == ""


def test_a_fault_of_the_page_is_one_line_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    page = served(lambda: PAGE[:0] + bytes([256]))
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(page, path_of(page))
    page.shutdown()
    said = "".join(capfd.readouterr())
    assert said.startswith("a request failed: ValueError") and said.count("\n") == 1


def test_who_hangs_up_or_stays_silent_costs_neither_threads_nor_words(
    page: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    before, idle = threading.active_count(), []
    for _ in range(5):
        gone = socket.create_connection(("127.0.0.1", page.server_port))
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        gone.close()
    for _ in range(100):
        idle.append(socket.create_connection(("127.0.0.1", page.server_port)))
    assert ask(page, path_of(page))[:2] == (200, PAGE)
    assert threading.active_count() - before <= MOST
    assert "".join(capfd.readouterr()) == ""
    for link in idle:
        link.close()


def test_who_drips_is_ended_in_time(monkeypatch: pytest.MonkeyPatch, page: Server) -> None:
    monkeypatch.setattr(server, "LONGEST", 0.3)
    with socket.create_connection(("127.0.0.1", page.server_port), 5) as link:
        try:
            for _ in range(100):
                link.sendall(b"G")
                time.sleep(0.05)
        except OSError:
            return
    pytest.fail("it could drip for five seconds")


@pytest.mark.timeout(60)
def test_a_port_that_was_asked_for_is_that_one_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one, any that is free does."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("name: first-run\n")
    make_run(tmp_path / "runs")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command(["watch", f"PORT={port}"]) == 2
        told = capsys.readouterr().err
        assert (
            told.startswith(f"error: PORT: {port} can't be used: Address already in use\n")
            and "next: set another PORT" in told
        )
        monkeypatch.setattr(server, "PORT", port)
        with Server(lambda: PAGE) as other:
            assert other.server_port != port
    with served_on(port, lambda: PAGE) as asked:
        assert asked.server_port == port


class Everything:
    """The page of all runs of a folder, asked with its token."""

    def __init__(self, root: Path) -> None:
        self.root, self.runs = root, all_runs.AllRuns(root)
        self.server = served(all_runs.page, self.runs.routes)

    def ask(self, path: str, *words: str) -> tuple[int, bytes, http.client.HTTPMessage]:
        return ask(self.server, f"{path}?{'&'.join([f'token={self.server.token}', *words])}")

    def json(self, path: str, *words: str) -> Any:
        code, text, headers = self.ask(path, *words)
        assert code == 200 and headers["Content-Type"] == "application/json; charset=utf-8"
        return json.loads(text)

    def listed(self) -> dict[str, Any]:
        return {run["name"]: run for run in self.json("/runs.json")["runs"]}


@pytest.fixture
def everything(tmp_path: Path) -> Iterator[Everything]:
    made = Everything(tmp_path / "runs")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_the_page_of_all_runs_allows_its_own_script_alone(everything: Everything) -> None:
    code, text, _ = everything.ask("/")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text.decode())
    (script,) = re.findall(rb"<script>(.*)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    assert code == 200 and f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ") and "'self'" not in policy.replace(
        "connect-src 'self'", ""
    )
    assert not re.search(
        rb"innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\(|https?://(?!www.w3.org/2000/svg)",
        script,
    )
    assert script.count(b"\n") <= 350


def test_data_needs_the_token_and_the_name_of_a_listed_run(everything: Everything) -> None:
    """An empty folder has an empty list."""
    assert everything.json("/runs.json")["runs"] == []
    make_run(everything.root)
    (everything.root.parent / "results.json").write_text("{}")
    everything.listed()
    for path in everything.runs.routes:
        assert ask(everything.server, f"{path}?run=first-run")[0] == 403
    for name in ("", "..", "../runs/first-run", "other", "%00", "first-run%2f"):
        assert everything.ask("/curves.json", f"run={name}")[0] == 503
    assert everything.ask("/curves.json", "run=first-run")[0] == 200


def test_strange_names_and_damaged_files_are_rows_with_their_reasons(
    everything: Everything,
) -> None:
    root = everything.root
    for name in ("<b>bold", "a&b=c #1", "red\x1b[31m"):
        make_run(root, name=name, done=20, model=None).results.write_text('{"status": "finished"}')
    raw = root / os.fsdecode(b"raw\xff")
    raw.mkdir()
    (raw / "results.json").write_text("{}")
    results = {
        "half": b'{"status": "fin',
        "nan": b'{"usd": NaN}',
        "deep": b"[" * 9999,
        "bytes": b"\xff",
    }
    for name, content in results.items():
        make_run(root, name=name, done=5).results.write_bytes(content)
    metrics = {"noise": b"\0noise\n" * 999, "long": b"x" * 9999, "nested": b"[" * 9999 + b"\n"}
    for name, content in metrics.items():
        make_run(root, name=name, done=5).metrics.write_bytes(content)
    os.truncate(make_run(root, name="huge", done=5).metrics, 1 << 40)
    make_run(root, name="linked", done=5).metrics.unlink()
    (root / "linked/metrics.jsonl").symlink_to(make_run(root, name="good", done=5).metrics)
    found = everything.listed()
    unreadable = {name: run["note"] for name, run in found.items() if run["status"] == "unreadable"}
    assert set(unreadable) == {*results, *metrics, "huge", "linked"}
    assert unreadable["nan"] == "nan/results.json:1: NaN is not a finite number"
    assert unreadable["linked"] == "linked/metrics.jsonl: is a link, not a file"
    assert {"<b>bold", "a&b=c #1", r"red\x1b[31m", r"raw\udcff"} <= set(found)
    for run in found.values():
        told = everything.json("/curves.json", f"run={run['id']}")
        assert ("fault" in told) == (run["status"] == "unreadable"), run
    names = [f"run={found[name]['id']}" for name in ("good", r"raw\udcff")]
    assert "config.yaml" in everything.json("/differences.json", *names)["fault"]


def test_a_report_and_a_log_come_without_scripts_escapes_and_links(everything: Everything) -> None:
    run = make_run(everything.root, done=20)
    run.report.write_text("<script>alert(1)</script>")
    run.logs.mkdir()
    (run.logs / "node-0.log").write_text("rank 0 \x1b[2J<script>\n" * 9999 + "half a line")
    (run.logs / "node-1.log").symlink_to(run.config)
    everything.listed()
    code, text, headers = everything.ask("/report", "run=first-run")
    assert code == 200 and b"alert" in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src ")
    code, text, headers = everything.ask("/log", "run=first-run")
    assert headers["Content-Type"] == "text/plain; charset=utf-8" and b"is a link" in text
    assert b"rank 0 \\x1b[2J<script>" in text and len(text) < 2 * all_runs.LOG_END


def test_long_curves_keep_their_spikes_and_show_more_when_they_are_cut(
    everything: Everything,
) -> None:
    run = make_run(everything.root, done=5)
    lines = [
        {
            "step": step,
            "loss": 9.0 if step == 7_777 else 2.0 - step / 1e5,
            "span": 0.5,
            "tokens": step * 8,
        }
        for step in range(1, 20_001)
    ]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, lines[0] | {"loss": 5.0}])
    run.metrics.write_text(
        text.replace('{"step": 30, ', '{"step": 30, "loss": 1, "lo\n{"step": 30, ')
    )
    everything.listed()
    found = everything.json("/curves.json", "run=first-run")
    steps, losses = found["loss"]
    assert len(steps) <= all_runs.POINTS and steps == sorted(steps)
    assert (steps[0], losses[0], steps[-1], losses[-1]) == (1, 5.0, 20_000, 1.8)
    assert max(losses) == 9.0 and steps[losses.index(9.0)] == 7_777
    assert found["elapsed"][1][-1] == 10_000 and found["tokens"][1][-1] == 160_000
    near = everything.json("/curves.json", "run=first-run", "begin=7700", "end=7800")["loss"]
    assert near[0] == [*range(7_699, 7_802)]


def test_only_what_changed_is_read_again(
    everything: Everything, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    whole = all_runs.summary_of
    monkeypatch.setattr(all_runs, "summary_of", lambda run: read.append(run.name) or whole(run))
    run, _ = (
        make_run(everything.root),
        make_run(everything.root, name="trains", status="running", unattended=True),
    )
    assert everything.listed()["first-run"]["status"] == "finished"
    assert sorted(read) == ["first-run", "trains"]
    everything.listed()
    assert sorted(read) == ["first-run", "trains", "trains"]
    run.update_results(status="failed")
    assert (
        everything.listed()["first-run"]["status"] == "failed" and read[3:].count("first-run") == 1
    )


def test_runs_of_other_folders_and_of_s3_are_shown_and_an_unreachable_address_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_runs, "EVERY", 0.2)
    monkeypatch.setattr("trainfleet.storage.folder_sync.PART", 5000)  # a run's metrics are several
    other, there = tmp_path / "other", tmp_path / "there"
    make_run(other, name="beside")
    (other / "link").symlink_to(make_run(tmp_path / "far", name="far").folder)
    watched = ["s3://bucket/some/runs/", "s3://nowhere/runs", str(other), str(tmp_path / "gone")]
    with s3server.serve(lambda application: application):
        for name in ("line", "..."):
            run = make_run(there, name=name, status="failed")
            run.record("verdict", who="rank 3", words="out of memory")
            FolderSync(run.folder, f"s3://bucket/some/runs/{name}").push(lambda _: True)
        pages = all_runs.AllRuns(tmp_path / "runs", watched)
        assert pages.runs()["runs"][0]["name"] == "beside", "S3 keeps nobody waiting"
        deadline = time.monotonic() + 20
        while len((found := pages.runs())["runs"]) < 2 or any(
            fault.endswith("is being read") for fault in found["faults"]
        ):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        runs = {run["name"]: run for run in found["runs"]}
        assert set(runs) == {"beside", "line"} and len(found["faults"]) == 2, found["faults"]
        assert (
            found["faults"][0].startswith("s3://nowhere/runs: ") and "why: " in found["faults"][0]
        )
        assert found["faults"][1] == f"{tmp_path / 'gone'}: is not a readable folder"
        line, beside = runs["line"], runs["beside"]
        assert (line["where"], beside["where"]) == ("s3://bucket/some/runs", str(other))
        assert line["note"] == "rank 3: out of memory" and line["loss"] == beside["loss"]
        local = all_runs.columns_of(Run(there / "line"))["loss"]
        query = {"run": [unquote(line["id"])]}
        steps, losses = pages.curves(query)["loss"]
        assert steps == local[0] and len(losses) == len(steps)
        told = pages.differences({"run": [*query["run"], unquote(beside["id"])]})
        assert told["fault"].startswith("line/config.yaml:2: "), (
            "it came, and is none that was resolved"
        )


def test_what_is_watched_is_in_the_config_and_a_broken_config_hides_no_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _watched() == ()
    Path("config.yaml").write_text("name: x\nwatch: [../other/runs, s3://bucket/runs]\n")
    assert _watched() == ("../other/runs", "s3://bucket/runs")
    Path("config.yaml").write_text("name: x\nwatch: [1]\n")
    assert _watched() == () and "config.yaml:2: watch" in capsys.readouterr().err
