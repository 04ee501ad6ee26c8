"""A node's part of a job: its placement, the barrier before the start, and the exit codes."""
