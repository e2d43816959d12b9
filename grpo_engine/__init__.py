"""The engine under grpo-tui: mathematics, data, weights, servers and environments for GRPO.

Importing the package loads nothing heavy; torch comes in with the rooms that need it.
"""

__version__ = "0.1.0"
