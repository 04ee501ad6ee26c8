"""`python -m trainfleet VERB [VARIABLE=value …]`: what every line of the Makefile calls."""

import signal
import sys

on_interrupt = signal.getsignal(signal.SIGINT)
if on_interrupt is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing has begun while this loads: Ctrl-C ends it without a traceback
from . import output  # noqa: E402
from .cli import main  # noqa: E402

signal.signal(signal.SIGINT, on_interrupt)
output.install()
sys.exit(main(sys.argv[1:]))
