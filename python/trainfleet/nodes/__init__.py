"""The hosts of a fleet: how they are reached, read, made ready and judged. The one room that knows SSH."""
