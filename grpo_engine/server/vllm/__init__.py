"""The inference engine on vLLM."""
