"""The parameter service: the newest weights in host memory, one process a machine."""
