"""What will be done, computed and not done: jobs, estimates, the exact requests. Pure."""
