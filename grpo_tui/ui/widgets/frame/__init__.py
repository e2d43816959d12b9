"""What every screen of a run shows around its body."""
