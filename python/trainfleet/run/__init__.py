"""The run folder: its files, events and records, and who may write to it."""
