"""Validates external input and redacts secrets in output. Imports no other trainfleet package."""
