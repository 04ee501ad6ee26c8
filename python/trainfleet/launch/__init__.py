"""Implementations of the commands. A command resolves its variables into a plan, executes the plan
here or on a fleet's head, and follows the run until it ends.
"""
