"""The board: the app that `grpo-tui` alone opens; it lists all runs and sweeps of this host, and opens one of them."""
