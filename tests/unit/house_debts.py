"""What still breaks the house's measures (test_house.py), name by name. Mend one and take it out; nothing may be added."""

from __future__ import annotations

ROOMS, ARROWS = 25, 147  # at most
TOKENS, MODULES = 423737, 322
DENSE = {  # more than 250 tokens
}
BRANCHED = {  # more than 12 decisions
}
LONG = {  # more than 450 lines
}
