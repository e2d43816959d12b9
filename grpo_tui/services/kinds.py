"""The kinds of service, each imported when a profile uses it.

A kind imports the settings of its part of the engine; building them all takes longer than the rest of a start, and a
profile of commands needs none of them.
"""

from __future__ import annotations

import importlib

from grpo_tui.services.base import Service

KINDS = {
    "command": "Command",
    "rollout_api": "RolloutApi",
    "inference": "Inference",
    "environment": "Environment",
    "atropos_environment": "AtroposEnvironment",
    "trainer": "Trainer",
    "reference": "Reference",
    "parameters": "Parameters",
}
"""Class by kind; the kind is the name of its module. A new kind is one new file and one name here."""


def service_class(kind: str) -> type[Service]:
    """Load the class of one of `KINDS`."""
    found: type[Service] = getattr(importlib.import_module(f"grpo_tui.services.{kind}"), KINDS[kind])
    return found
