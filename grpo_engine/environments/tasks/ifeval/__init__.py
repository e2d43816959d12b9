"""Instruction following: verifiable instructions, generated prompts, and the task."""
