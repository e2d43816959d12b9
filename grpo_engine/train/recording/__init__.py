"""What a training run writes for people: metrics, sampled rollouts, console lines, trackers."""
