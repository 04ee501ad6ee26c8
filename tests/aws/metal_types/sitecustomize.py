"""For every Python that has this folder in its path: instances are this machine's namespaces, and have its memory and cores."""

import os
from dataclasses import replace

from trainfleet.hardware.node_types import INSTANCE_TYPES

_row = INSTANCE_TYPES["c7i.8xlarge"]
_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
INSTANCE_TYPES[_row.name] = replace(_row, memory_gib=_memory, vcpus=os.cpu_count() or 1)
