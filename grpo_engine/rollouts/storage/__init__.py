"""The SQLite file of the rollout API and the thread that writes to it."""
