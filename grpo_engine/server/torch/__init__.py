"""The inference engine on plain torch, for a CPU or one GPU."""
