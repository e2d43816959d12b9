"""Sweeps: the points of a grid, each an ordinary run, and a table of what they came to."""
