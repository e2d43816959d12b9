"""State and readers of the metrics screen."""
