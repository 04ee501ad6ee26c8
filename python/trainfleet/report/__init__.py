"""Presents a run: live line, plots, one-page report and final summary. All of them read only the
run folder.
"""

import logging

# matplotlib warns about a read-only home directory, which it does not need.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
