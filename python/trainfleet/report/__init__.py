"""Views of a run: live line, plots, one-page report and final summary. They read only the run
folder.
"""

import logging

# matplotlib warns if the home directory is read-only, although it does not need it.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
