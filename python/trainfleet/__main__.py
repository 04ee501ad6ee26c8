"""`python -m trainfleet VERB [VARIABLE=value …]`: what each line of the Makefile calls; `trainfleet
VERB` where installed.
"""

import os
import sys

os.environ["PYTHONSAFEPATH"] = "1"  # for the programs that verbs start
os.environ["PATH"] = os.pathsep.join(
    part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part not in ("", ".")
)
_CODE = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 - pathlib may be a file that lies here
try:
    os.getcwd()  # noqa: PTH109
except FileNotFoundError:
    sys.exit(
        "error: this folder was removed\n  next: cd to a folder that exists, then run the same "
        "command again"
    )
if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()) and os.getcwd() != _CODE:  # noqa: PTH109
    del sys.path[0]  # files where a verb is typed are not packages

import locale  # noqa: E402
import signal  # noqa: E402


def command() -> int:
    """The `trainfleet` command; its exit code."""
    os.environ["TRAINFLEET_COMMAND"] = (
        "trainfleet"  # trust/safe_output.py names commands as they are typed
    )
    return program()


def program() -> int:
    """Runs the verb that sys.argv names; its exit code."""
    _read_utf8()
    os.umask(os.umask(0o77) & 0o77)  # a file is never closed to its owner
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:
        # while imports run, Ctrl-C exits without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main
    from .trust import safe_output

    signal.signal(signal.SIGINT, on_interrupt)
    safe_output.install()
    return main(sys.argv[1:])


def _read_utf8() -> None:
    """Starts again in UTF-8 mode where the locale has another encoding, in which our files would be
    misread.
    """
    asked = os.environ.get("PYTHONUTF8") == "1"
    if (
        not (sys.flags.utf8_mode or asked)
        and locale.getencoding().lower().replace("-", "") != "utf8"
        and sys.executable
    ):
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    sys.exit(program())
