"""Fleet hosts over SSH: connections, facts, setup and checks.

No other package uses SSH.
"""
