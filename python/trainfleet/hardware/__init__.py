"""What machines have and how fast they are: types of nodes, accelerators, and this machine's
CPUs.
"""
