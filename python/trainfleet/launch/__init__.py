"""Orchestrates the work of verbs: from a command's variables to a plan, its execution here or on a
head, and the end of a run.
"""
