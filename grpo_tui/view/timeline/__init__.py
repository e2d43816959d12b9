"""The past of a run: its events, and the moment that is shown."""
