"""Adapters for stock Atropos clients, which neither acknowledge batches nor send typed JSON."""
