"""Reads what torch.save wrote, without torch.load: checkpoints of format 2, and NxD Core's. Nothing here writes.

pickled   a pickle as data
archive   one file of torch.save's, or a part of one
index     the index of a checkpoint of format 2
"""

from __future__ import annotations
