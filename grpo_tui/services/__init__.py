"""Kinds of service: one file per kind, registered in `kinds`."""
