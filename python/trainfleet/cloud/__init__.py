"""AWS: one way to send control requests, the resources that are made there, their costs, and what
may prevent them.
"""
