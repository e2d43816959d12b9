"""State and readers of the log screen."""
