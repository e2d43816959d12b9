"""What the screen knows: pure state, its reduction, and the diagnosis."""
