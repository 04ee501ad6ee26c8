"""Plans a run without doing anything: jobs, estimates, the exact requests. Pure."""
