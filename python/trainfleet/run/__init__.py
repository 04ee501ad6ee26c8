"""The run folder: its files, events and records, and the rules for writing to it."""
