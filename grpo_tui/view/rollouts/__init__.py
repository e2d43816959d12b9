"""State and readers of the rollout screen."""
