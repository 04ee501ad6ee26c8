"""The machine that a process runs on: its processes, folders, adapters and sandbox, and the program's own files there."""
