"""Words that come from elsewhere, where they are shown: no escape sequence reaches a terminal, no markup the report."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import make_run

import verbs
from trainfleet.config.host_list import Host
from trainfleet.hosts.host_results import Board
from trainfleet.launch import remote_launch
from trainfleet.report import html
from trainfleet.report.history import History, read
from trainfleet.report.live import LiveLine
from trainfleet.run.run_folder import Run
from trainfleet.trust.safe_output import SafeStream, guarded

EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b31m\u202egnp.exe\x08\x7f"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def plant(folder: Path) -> Run:
    """A run whose node writes what it likes, as far as the formats of its files let it."""
    run = make_run(folder / "runs", name="mine", status="failed", done=20)
    run.logs.mkdir()
    for log in ("node-0.log", "launcher.log"):
        (run.logs / log).write_text(f"rank 0  12:00:00.000 | {EVIL}\n")
    (folder / "config.yaml").write_text("name: mine\n")
    return run


@pytest.mark.parametrize("verb", ["logs", "status", "checkpoints", "report"])
def test_no_escape_sequence_of_a_node_reaches_the_terminal(tmp_path: Path, verb: str) -> None:
    plant(tmp_path)
    said = verbs.begin(tmp_path, verb).communicate(timeout=60)[0]
    assert said and not RAW.search(said), said.encode("unicode_escape")
    assert verb != "logs" or "\\x1b[31mred\\x9b31m\\u202egnp.exe" in said


def test_the_launcher_s_words_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = plant(tmp_path)
    with guarded():
        remote_launch.LauncherLogs(run).show()
    said = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07" in said and not RAW.search(said)


def on_terminal(program: str, folder: Path) -> str:
    """What a terminal receives of a Python program."""
    ours, theirs = pty.openpty()
    environment = os.environ | {
        "TERM": "xterm-256color",
        "PYTHONPATH": str(verbs.ROOT / "python"),
        "COLUMNS": "100",
    }
    environment.pop("NO_COLOR", None)
    done = subprocess.Popen(
        [sys.executable, "-c", program], stdout=theirs, stderr=theirs, cwd=folder, env=environment
    )
    shown = b""
    while done.poll() is None or select.select([ours], [], [], 0.2)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            shown += os.read(ours, 4096)
    os.close(theirs)
    return shown.decode(errors="replace")


@pytest.mark.parametrize("program", [
    "from trainfleet.report.live import LiveLine; LiveLine(sys.stdout).say(EVIL)",
    "from trainfleet.hosts.host_results import Board, Host\nwith Board([Host('a', 'a')]) as board: board.show(Host('a', 'a'), 'FAILED', EVIL)",
    "from trainfleet.hosts.host_results import Board, Host\nwith Board([Host('a', 'a')]) as board: board.say(EVIL)",
    "print(EVIL)", "raise ValueError(EVIL)", "sys.stderr.write(EVIL)",
])  # fmt: skip
def test_what_draws_on_a_terminal_shows_foreign_words_too(tmp_path: Path, program: str) -> None:
    shown = on_terminal(
        f"import sys; from trainfleet.trust.safe_output import install; install(); EVIL = {EVIL!r}\n{program}",
        tmp_path,
    )
    assert (
        "\\x1b]0;owned\\x07" in shown
        and "\x1b]0" not in shown
        and "\x1b[2J" not in shown
        and "\u202e" not in shown
    ), shown


def test_a_board_and_a_line_in_a_pipe_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    host = Host("a", "a")
    with guarded():
        with Board([host]) as board:
            board.show(host, "FAILED", f"{EVIL}\nfake  ok")
        LiveLine(sys.stdout).say(EVIL)
        assert isinstance(sys.stdout, SafeStream)
    said = capsys.readouterr().out
    assert not RAW.search(said) and len(said.splitlines()) == 2


ATTACKS = [
    '"><script>x()</script>',
    "' onmouseover='x()",
    'failed" style="background:url(//evil)',
    "</style><img src=x>",
    EVIL,
]


@pytest.mark.parametrize(
    "attack",
    [
        ATTACKS[0],
        EVIL,
        *(pytest.param(attack, marks=pytest.mark.thorough) for attack in ATTACKS[1:-1]),
    ],
)
def test_no_value_stands_raw_in_the_report(
    tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plant(tmp_path)
    history = read(run)
    evil = dict.fromkeys(("backend", "device", "mfu_formula"), attack) | {
        "model": {"family": attack, "parameters": 5}
    }
    events = [
        {"time": 1.0, "event": attack, "who": attack, "words": attack},
        {"time": 2.0, "event": "fault", "message": attack, "why": attack},
    ]
    results = (
        history.results
        | evil
        | {"sample": {"prompt": attack, "text": attack}, "seconds": {attack: 5.0, "train": 4.0}}
    )
    hostile = replace(history, status=attack, results=results, events=events)
    monkeypatch.setattr(html, "read", lambda run: hostile)
    text = html.write(Run(tmp_path / attack.replace("/", ""))).read_text()
    body = text[text.index("<main>") :]
    assert 'class="badge unknown"' in body
    assert not re.search(
        r"<script|<img|onmouseover='|style=\"background:url|</style>",
        re.sub(r"<svg.*?</svg>", "", body, flags=re.DOTALL),
    )
    assert not RAW.search(text)
    assert isinstance(hostile, History)


def test_the_report_has_a_policy_that_its_own_style_satisfies(tmp_path: Path) -> None:
    text = html.write(plant(tmp_path)).read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', text)
    assert policy and text.index("Content-Security-Policy") < text.index("<style>")
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert (
        rules["default-src"] == "'none'"
        and "script-src" not in rules
        and rules["style-src"] == "'unsafe-inline'"
    )
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert not re.search(r"<script|<link|<iframe|<object|\son\w+=|javascript:", text), (
        "the policy would break the page"
    )
    assert not re.search(r'(src|href)="(?!#|data:)', text)


def test_events_that_the_formats_let_through_show_no_control_characters(tmp_path: Path) -> None:
    run = plant(tmp_path)
    path = next(run.folder.rglob("*.jsonl"))
    path.write_text(
        path.read_text()
        + json.dumps({"time": 1.0, "event": "notice", "node": 0, "notice": EVIL})
        + "\n"
    )
    said = verbs.begin(tmp_path, "status").communicate(timeout=60)[0]
    assert not RAW.search(said)


def test_output_that_finds_no_room_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainfleet", "recipes"]
    environment = os.environ | {"PYTHONPATH": str(verbs.ROOT / "python"), "PYTHONUNBUFFERED": "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=tmp_path,
            env=environment,
        )
    assert (
        done.returncode == 1 and "No space left" in done.stderr and "Traceback" not in done.stderr
    )
