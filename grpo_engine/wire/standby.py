"""How an inference server with a standby (`grpo_engine.server.standby`) is restarted in place."""

from __future__ import annotations

import signal

RESTART_SIGNAL = signal.SIGHUP
"""Sent to the standby by whoever wants its server restarted: the supervisor, or a person."""
NOTHING_LEFT_LINE = "Standby: nothing is left of the last server; the next one starts"
"""A line of the log, written by the standby and read by the supervisor: from there on, the next server answers."""
