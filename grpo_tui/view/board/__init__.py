"""The board: all runs and sweeps of this host as one list, and curves of some of them over each other."""
