"""Follows a job: its progress, its stops, and the verdict when it fails."""
