"""Plans a run without side effects: jobs, estimates and exact requests."""
