"""A trainer that samples itself: problems of a task, inference engines in its own ranks, and no other service."""
