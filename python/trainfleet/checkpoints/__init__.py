"""Checkpoints for both planes: which exist, which are complete, which stay. No torch; the engine
writes the bytes.

marker      the file that makes a folder of files a checkpoint: written last, with all checksums
store       a folder of a local or shared file system, or a place in S3, in which a checkpoint
            appears at once
index       which tensors a checkpoint holds, and the place of each of their pieces
listing     which checkpoints are good or broken, for verification, resuming and retention
changes     which config values may differ when a run resumes, which may not, and why
"""

from __future__ import annotations
