"""Describes machines and their speed: types of nodes, accelerators, and this machine's CPUs."""
