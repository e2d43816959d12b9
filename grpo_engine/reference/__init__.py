"""A service that holds the reference model on devices of its own."""
