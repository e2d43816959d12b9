"""How a version of the weights reaches a server: requests, checkpoints, restarts."""
