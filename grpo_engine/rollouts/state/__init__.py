"""In-memory state of the rollout API, without clock, disk or network: queue, leases, environments, evaluation."""
