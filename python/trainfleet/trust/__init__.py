"""What comes in from elsewhere is checked, and what goes out hides secrets. Imports no other
room.
"""
