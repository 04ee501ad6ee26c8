"""Job monitoring: progress, stop requests, and the verdict after a failure."""
