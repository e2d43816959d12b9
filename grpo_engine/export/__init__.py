"""Checkpoints as folders that other programs load: transformers, PEFT, vLLM."""
