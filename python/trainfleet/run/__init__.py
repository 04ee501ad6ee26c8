"""The run folder, with its files, events and records, and the rules about who may write to it."""
