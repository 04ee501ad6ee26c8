"""Checks input from elsewhere, and hides secrets in output. Imports no other room."""
