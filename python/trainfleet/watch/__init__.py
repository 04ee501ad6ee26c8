"""Staying with a job: progress, stops, and the verdict when it fails."""
