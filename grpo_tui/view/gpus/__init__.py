"""State and rules of the GPU screen."""
