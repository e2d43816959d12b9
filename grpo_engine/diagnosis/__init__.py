"""Diagnoses in one form, and the verdict on alignment. Pure and torch-free: the engine and the terminal side use it."""
