"""How much GPU memory a training run takes, and whether it fits."""
