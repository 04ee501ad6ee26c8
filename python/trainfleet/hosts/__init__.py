"""The hosts of a fleet: reaching them, reading their facts, setting them up and examining them. The
only package that knows SSH.
"""
