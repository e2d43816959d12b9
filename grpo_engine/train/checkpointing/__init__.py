"""What a run keeps in order to resume: checkpoints, and the batches since the newest one."""
