"""What a login shell is given: each reads it as sh does, whatever the command's own words are."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from requirement import need_program
from trainfleet.hosts.tar import OUTPUT_BEGINS, said
from trainfleet.hosts.transport import bounded

COMMANDS = [
    "cat; echo 'it''s' >&2; exit 3",
    "echo 'wow! !! !$ !echo'; cat; exit 0",  # csh's history, which quotes do not end
    "cat\n\n# a comment's quote\necho $((1 + 1)) \\\n `echo b`\nexit 4\n",
    "cat << 'END'\n\\ \\' \\\\ $HOME *.x {a,b} ~ ^x^y^ %1 é\nEND\nf() { return 5; }; f",
    f"echo {shlex.quote('a' * 60_000)} | wc -c; cat",
]


def run(words: list[str], **more: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        words, input=b"given\n", capture_output=True, env=os.environ | more, timeout=30, check=False
    )


@pytest.mark.parametrize(
    "command", COMMANDS, ids=["quotes", "history", "lines", "here-document", "long"]
)
def test_tcsh_runs_a_command_as_sh_does(command: str, tmp_path: Path) -> None:
    """As sshd starts it for its user, whose own file greets."""
    (tmp_path / ".cshrc").write_text("echo hello from cshrc\nset prompt='> '\n")
    tcsh = need_program("tcsh", "apt-get install tcsh")
    expected = run(["sh", "-c", command])
    found = run([tcsh, "-c", bounded(command, 20)], HOME=str(tmp_path))
    assert found.stdout.startswith(b"hello from cshrc\n" + OUTPUT_BEGINS)
    assert (found.returncode, said(found.stdout), said(found.stderr)) == (
        expected.returncode,
        expected.stdout,
        expected.stderr,
    )


def test_a_login_shell_is_given_nothing_that_one_reads_differently() -> None:
    """fish reads backslashes inside single quotes, csh line ends and `!`, rc a caret outside them."""
    for command in COMMANDS:
        words = bounded(command, 20)
        before, inside, after = words.split("'")
        assert not set("!\n\\") & set(words) and not after and not set('^$`"') & set(before), (
            inside[:50]
        )


def test_a_node_that_can_not_decode_a_command_does_not_seem_to_have_run_it(tmp_path: Path) -> None:
    for name in ("sh", "timeout"):
        (tmp_path / name).symlink_to(need_program(name, "apt-get install coreutils"))
    assert run(["/bin/sh", "-c", bounded("true", 20)], PATH=str(tmp_path)).returncode == 127
