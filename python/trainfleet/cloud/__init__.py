"""AWS control plane: the client for all control requests, the resources that a fleet uses, their
costs, and checks for obstacles to creating them.
"""
