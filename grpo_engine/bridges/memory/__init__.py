"""Weights in memory that trainer and server share, and the lock on them."""
