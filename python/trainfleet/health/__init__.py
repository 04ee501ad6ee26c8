"""Tells whether ranks, nodes and launchers live and make progress: heartbeats, watchdog, lease,
fence, and kernel messages.
"""
