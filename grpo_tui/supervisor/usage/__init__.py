"""CPU, memory and GPU memory by service, and limits on them."""
