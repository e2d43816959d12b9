"""Every error whose message is shown to users.

A message has three parts: what is wrong with the actual value, where, and what to do about it.

    GrpoError
    ├── ConfigError          a setting: unknown, of the wrong type, out of bounds, contradicting another
    ├── ModelError           a model or tokenizer that is missing, or that does not fit its configuration
    │   └── UnusableModel    … and that a restart finds as it is
    ├── DataError            a group or batch: ragged, empty, not finite, without log-probabilities
    ├── PeerError            another process answered something outside the protocol
    │   └── PeerUnavailable  … or did not answer within its time limit
    ├── BridgeError          weights cannot reach inference
    │   └── HalfWritten      a writer died during an update
    └── CheckpointError      a checkpoint is missing, incomplete, or belongs to something else
"""

from __future__ import annotations

import re
from collections.abc import Iterable

NO_PATTERN = (re.error, OverflowError, RecursionError)
"""What `re.compile` raises: also for a count above 2^32 or brackets nested a thousand deep."""


def first_of(names: Iterable[str], most: int = 8, *, separator: str = ", ") -> str:
    """Names for a message: the first ones, and the number of others."""
    listed = list(names)
    rest = len(listed) - most
    return separator.join(listed[:most]) + (f" and {rest} more" if rest > 0 else "")


class GrpoError(Exception):
    """Base of every error with a message for users; any other exception that escapes is a bug."""

    is_final = False
    """Whether the same command would fail the same way again, so that a supervisor does not restart it."""


class ConfigError(GrpoError, ValueError):
    """A setting is unknown, of the wrong type, out of bounds, or contradicts another."""

    is_final = True


class ModelError(GrpoError):
    """A model or tokenizer is missing, or does not fit its configuration."""


class UnusableModel(ModelError):
    """A model that is named in the settings is missing or damaged, or lacks what is needed to make it."""

    is_final = True


class DataError(GrpoError, ValueError):
    """A group or batch cannot be trained on."""

    is_final = True


class PeerError(GrpoError):
    """Another process answered something outside the protocol."""


class PeerUnavailable(PeerError):
    """Another process did not answer within its time limit."""


class BridgeError(GrpoError):
    """New weights cannot reach inference."""


class HalfWritten(BridgeError):
    """The shared weights were left half-written by a writer that died."""


class CheckpointError(GrpoError):
    """A checkpoint is missing, incomplete, or belongs to another model or run."""
