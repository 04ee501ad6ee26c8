"""Describes hardware: accelerators, node types and the speed of this machine's CPUs."""
