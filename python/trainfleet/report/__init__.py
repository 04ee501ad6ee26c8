"""Views of a run: live progress line, plots, one-page report and final summary. They read only the
run folder.
"""

import logging

# matplotlib warns about a read-only home directory, although it does not need to write there.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
