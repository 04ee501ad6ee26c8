"""Utilities for the local machine: processes, file systems, network adapters and the program's own
files.
"""
