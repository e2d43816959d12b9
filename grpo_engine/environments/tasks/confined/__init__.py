"""Scoring of text that nobody has checked, in a process from which nothing can be reached."""
