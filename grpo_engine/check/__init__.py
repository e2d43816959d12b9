"""Whether sampler and trainer agree, told before training."""
