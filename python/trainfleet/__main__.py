"""`python -m trainfleet VERB [VARIABLE=value …]`: what each line of the Makefile calls; `trainfleet VERB` where installed."""

import locale
import os
import signal
import sys


def command() -> int:
    """The `trainfleet` command; its exit code."""
    os.environ["TRAINFLEET_COMMAND"] = "trainfleet"  # output.py names commands as they are typed
    return program()


def program() -> int:
    """Runs the verb that sys.argv names; its exit code."""
    _read_utf8()
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while imports run, Ctrl-C exits without a traceback
    from . import output
    from .cli import main

    signal.signal(signal.SIGINT, on_interrupt)
    output.install()
    return main(sys.argv[1:])


def _read_utf8() -> None:
    """Starts again in UTF-8 mode where the locale has another encoding, in which our files would be misread."""
    asked = os.environ.get("PYTHONUTF8") == "1"
    if not (sys.flags.utf8_mode or asked) and locale.getencoding().lower().replace("-", "") != "utf8" and sys.executable:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    sys.exit(program())
