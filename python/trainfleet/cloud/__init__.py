"""AWS: the one way to send control requests, the resources that a fleet uses, their costs, and the
obstacles to making them.
"""
