"""The hosts of a fleet: how they are reached, read, made ready and examined. The one room that
knows SSH.
"""
