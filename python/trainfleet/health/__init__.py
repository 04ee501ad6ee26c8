"""Liveness and progress of ranks, nodes and launchers: heartbeats, watchdog, lease, fencing, and
kernel messages.
"""
