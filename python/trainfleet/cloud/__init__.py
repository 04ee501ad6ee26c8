"""AWS: one door for every control request, and what is made there, what it costs, and what may stop it."""
