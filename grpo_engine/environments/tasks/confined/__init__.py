"""Scoring of unchecked text, in a process from which nothing can be reached."""
