"""Which items are sampled and in which order: curriculum, difficulty filter, held-out items."""
