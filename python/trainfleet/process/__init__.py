"""The machine that a process runs on: its processes, folders and adapters, and the program's own
files.
"""
