"""Liveness and progress of ranks, nodes and launchers: heartbeats, watchdog, lease, fence, and
kernel messages.
"""
