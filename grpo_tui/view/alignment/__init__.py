"""State, numbers and rules of the alignment screen."""
