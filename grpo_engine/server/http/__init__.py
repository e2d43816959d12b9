"""The HTTP routes of the inference server, over any engine."""
