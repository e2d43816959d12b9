"""Where the trained parameters live."""
