"""Shows a run: the live line, the plots, the one-page report and the closing summary. All read only
the run folder.
"""

import logging

# matplotlib warns about a read-only home, which it does not need
logging.getLogger("matplotlib").setLevel(logging.ERROR)
