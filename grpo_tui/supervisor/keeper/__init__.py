"""Processes: the keeper of a service attempt, its client in the daemon, and who is who in /proc."""
