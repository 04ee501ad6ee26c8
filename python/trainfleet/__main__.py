"""`python -m trainfleet VERB [VARIABLE=value …]`: what every line of the Makefile calls."""

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
