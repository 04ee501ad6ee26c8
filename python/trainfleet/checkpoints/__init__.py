"""Manages checkpoints for both planes, without torch. The engine writes the tensors.

marker:   the last file of a save, with all checksums, which makes a folder a checkpoint
store:    storage in which checkpoints appear atomically, in a folder or in S3
index:    the tensors of a checkpoint, and the locations of their pieces
listing:  the valid and broken checkpoints, for verification, resuming and retention
changes:  the config values that may or may not change when a run resumes, with the reasons
"""

from __future__ import annotations
