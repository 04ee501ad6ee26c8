"""Orchestrates verbs: a command's variables become a plan, which runs here or on a head, until the
run ends.
"""
