"""Whether ranks, nodes and launchers live and make progress: heartbeats, watchdog, lease, fence,
and what kernels report.
"""
