"""Implementations of the verbs. A verb turns a command's variables into a plan, executes the plan
here or on a head, and follows the run until it ends.
"""
