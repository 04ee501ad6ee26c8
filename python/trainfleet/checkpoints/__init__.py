"""Checkpoints without torch, for both planes. The engine writes the tensors.

marker:     the last file of a save, with all checksums, which makes a folder a checkpoint, and the
            config values that may or may not change when a run resumes, with the reasons
store:      storage in which checkpoints appear atomically, in a folder or in S3; valid and broken
            ones, for verification, resuming and retention
index:      the tensors of a checkpoint, and where their pieces are stored
init_from:  the model in train.init_from, checked before a run starts
"""

from __future__ import annotations
