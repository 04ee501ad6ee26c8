"""Tells whether ranks, nodes and launchers are alive and make progress: heartbeats, watchdog,
lease, fence, and kernel messages.
"""
