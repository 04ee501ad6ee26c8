"""A node's part of a job: placement, the barrier before the start, and exit codes."""
