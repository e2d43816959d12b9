"""What is sent to the terminal: only changed cells, and no more than the connection carries."""
