"""Seeing a run: the live line, the plots, the one-page report and the closing summary; all read the
run folder only.
"""

import logging

# it warns of a home that can't be written, and needs none
logging.getLogger("matplotlib").setLevel(logging.ERROR)
