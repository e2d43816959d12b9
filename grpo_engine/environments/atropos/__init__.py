"""Environments of Atropos (`atroposlib` 0.4.0) as they are: their settings file, their process, and an eye on it."""
