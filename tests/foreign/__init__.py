"""Inputs that nobody should have to write: made from a seed, judged in this process. tests/unit takes a sample, tests/drills all."""
