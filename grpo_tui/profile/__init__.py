"""Profiles: the model, loading, the launch plan, and the checks before a start."""
