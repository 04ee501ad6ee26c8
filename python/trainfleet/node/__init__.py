"""A node's part of a job: placement, startup barrier and exit codes."""
