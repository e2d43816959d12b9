"""Reward functions and items from a Python module of the user."""
