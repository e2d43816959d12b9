"""Readers of the files in a run folder, for supervisor and screen; `grpo_engine.wire.run_folder` has the names."""
