"""Implementations of the verbs. Each one turns a command's variables into a plan and executes it,
here or on a head, until the run ends.
"""
