"""Supervision and terminal of a GRPO training stack. Never imports torch, vLLM or transformers."""
