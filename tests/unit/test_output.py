"""Secrets in what leaves a process, and control characters in foreign words."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from trainfleet.run.run_folder import Run, append_line
from trainfleet.trust import redaction, safe_output
from trainfleet.trust.errors import RunError, tell

KEY = 'canary/5d1f "0c\'7e"&<b>\\n\u00e9'
PEM = "-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\nab==\n-----END KEY-----\n"


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "LONG": "abcdefgh-tail",
        "SHORT": "abcdefgh",
        "OVER": "tail-and-more",
        "THE_KEY": KEY,
        "PEM": PEM,
        "NO": "no",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(redaction.NAMES, "SHORT,LONG,THE_KEY,PEM,OVER,NO,UNSET")


@pytest.mark.parametrize("text", [
    KEY, f"x{KEY}y", json.dumps(KEY), json.dumps({"a": [KEY]}, ensure_ascii=False), repr(KEY), repr(ValueError(KEY)), quote(KEY),
    quote(KEY, safe=""), PEM, PEM.replace("\n", "\\n"), json.dumps(PEM), "rank 0 | MIIEvQIBADANBgkq", "key: -----BEGIN KEY-----", KEY * 3,
])  # fmt: skip
def test_a_value_is_hidden_in_every_spelling(text: str) -> None:
    hidden = redaction.hide(text)
    assert "***" in hidden and not any(
        part in hidden for part in ("canary", "0c", "7e", "MIIE", "hkiG", "BEGIN")
    )


@pytest.mark.parametrize("before", ["", "u:", "me:", "user:", "longer@example.com:"])
@pytest.mark.parametrize("after", ["", "\n", " and what follows"])
@pytest.mark.parametrize("encode", [
    lambda text: base64.b64encode(text).decode(), lambda text: base64.urlsafe_b64encode(text).decode().rstrip("="),
    lambda text: f"Authorization: Basic {base64.b64encode(text).decode()}",
])  # fmt: skip
def test_an_encoded_value_is_hidden_wherever_it_stands(
    encode: Callable[[bytes], str], before: str, after: str
) -> None:
    for value in (KEY, "abcdefgh-tail"):
        whole = encode(f"{before}{value}{after}".encode())
        own = {whole[at : at + 8] for at in range(len(whole) - 7)} - {
            encode(f"{before}{'x' * len(value.encode())}{after}".encode())[at : at + 8]
            for at in range(len(whole) - 7)
        }
        hidden = redaction.hide(whole)
        assert "***" in hidden
        assert len(own) > 8 and sum(part in hidden for part in own) <= 2, hidden


@pytest.mark.parametrize("width", [64, 76])
def test_an_encoded_value_is_hidden_in_lines_too(width: int) -> None:
    text = base64.b64encode(PEM.encode()).decode()
    lines = [text[at : at + width] for at in range(0, len(text), width)]
    assert len(lines) > 1 and all(
        redaction.hide(line).startswith("***") for line in lines if len(line) > 8
    ), lines


@pytest.mark.parametrize(("text", "hidden"), [
    ("abcdefgh-tail", "***"), ("abcdefgh", "***"), ("abcdefghabcdefgh-tail", "******"), ("abcdefgh-tail-and-more!", "***!"),
    ("abcdefgh-tai", "***-tai"), ("no secret", "no secret"), ("", ""),
])  # fmt: skip
def test_the_longest_secret_leaves_no_tail_and_overlaps_leave_nothing(
    text: str, hidden: str
) -> None:
    assert redaction.hide(text) == hidden
    assert redaction.hide_bytes(text.encode()) == hidden.encode()


def test_bytes_that_are_no_text_stay_as_they_are() -> None:
    assert redaction.hide_bytes(b"\xff\xfe abcdefgh \x80\n") == b"\xff\xfe *** \x80\n"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11])
@pytest.mark.parametrize(
    "text",
    [
        f"a {KEY} b\n",
        f"{PEM}x",
        "abcdefgh-tail-and-more abcdefgh, abcdefg",
        f"{KEY}{KEY[:5]}\n",
        "plain text\n",
    ],
)
def test_a_secret_in_several_writes_is_hidden_and_nothing_else_is_lost(
    text: str, size: int
) -> None:
    behind = io.StringIO()
    stream = safe_output.SafeStream(behind)
    for start in range(0, len(text), size):
        stream.write(text[start : start + size])
        stream.flush()
        assert not any(part in behind.getvalue() for part in ("canary", "abcdefgh", "MIIE"))
    stream.release()
    assert behind.getvalue() == "".join(map(redaction.hide, text.splitlines(keepends=True)))


def test_events_results_and_errors_hold_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "x")
    run.record(
        "fault",
        rank=0,
        node=0,
        error="ValueError",
        message=f"401 for {KEY}",
        why=PEM,
        next="",
        traceback=[f"  raise {KEY}"],
    )
    run.update_results(status="failed", verdict={"words": KEY, "lines": [PEM]})
    append_line(tmp_path / "x/metrics.jsonl", {"step": 1, "note": KEY})
    tell(RunError(f"can't log in with {KEY}", why=PEM, next=f"curl {quote(KEY)}"))
    said = "".join(capsys.readouterr()) + "".join(
        path.read_text() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert said.count("***") >= 8 and not any(part in said for part in ("canary", "MIIE", "hkiG"))


def test_an_uncaught_exception_of_a_process_shows_no_secret() -> None:
    program = (
        "import os; from trainfleet.trust.safe_output import install; from trainfleet.trust.redaction import keep_secret; install(); keep_secret(['THE_KEY', 'PEM'])\n"
        "print('my key', os.environ['THE_KEY'], end=''); raise ValueError(os.environ['THE_KEY'] + os.environ['PEM'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != redaction.NAMES}
    environment["PYTHONPATH"] = str(Path(safe_output.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 1 and "ValueError: ***" in done.stderr and done.stdout == "my key ***"
    assert not any(part in done.stdout + done.stderr for part in ("canary", "MIIE", "7e"))


@pytest.mark.parametrize(("text", "shown"), [
    ("\x1b[2J\x1b[31mred", "\\x1b[2J\\x1b[31mred"), ("\x1b]0;title\x07", "\\x1b]0;title\\x07"), ("\x9b31m", "\\x9b31m"), ("a\rb", "a\\x0db"),
    ("a\r\nb", "a\nb"), ("user\u202egnp.exe", "user\\u202egnp.exe"), ("\u2066x\u2069", "\\u2066x\\u2069"), ("tab\tnew\nline", "tab\tnew\nline"),
    ("\u00e9\u4e2d\U0001f600", "\u00e9\u4e2d\U0001f600"), ("\x00\x7f\x08", "\\x00\\x7f\\x08"), ("\ud800", "\\ud800"), ("a\u2028b", "a\\u2028b"),
])  # fmt: skip
def test_control_characters_are_visible(text: str, shown: str) -> None:
    assert safe_output.visible(text) == shown


def test_commands_are_named_as_they_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainfleet.cli import OF_A_CHECKOUT, VERBS

    for command, named in (("", "make"), ("trainfleet", "trainfleet")):
        monkeypatch.setenv("TRAINFLEET_COMMAND", command)
        stream = io.StringIO()
        guarded = safe_output.SafeStream(stream)
        for verb in VERBS:
            guarded.write(f"next: make {verb} NODES=4\n")
        expected = ["make" if verb in OF_A_CHECKOUT else named for verb in VERBS]
        assert [line.split()[1] for line in stream.getvalue().splitlines()] == expected


def test_a_process_that_crashes_in_native_code_says_where_it_was() -> None:
    program = "import os, signal\nfrom trainfleet.trust import safe_output as output\noutput.install()\ndef step():\n    os.kill(os.getpid(), signal.SIGSEGV)\nstep()"
    environment = os.environ | {"PYTHONPATH": str(Path(safe_output.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == -11 and "Fatal Python error: Segmentation fault" in done.stderr
    assert 'File "<string>", line 5 in step' in done.stderr


def test_a_reader_that_has_left_ends_a_program_quietly() -> None:
    program = (
        "from trainfleet.trust.safe_output import run_program\n"
        "run_program(lambda _: [print('a line') for _ in range(10**5)] and 1)"
    )
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -c "$PROGRAM" | head -1'],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {"PROGRAM": program, "PYTHONPATH": str(Path(safe_output.__file__).parents[2])},
    )
    assert (done.stdout, done.stderr) == ("a line\n", "")
