"""Validates external input, and hides secrets in output. Imports no other package of trainfleet."""
