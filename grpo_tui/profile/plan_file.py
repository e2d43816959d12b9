"""The plan of a run and the file it travels in: launches in start order, and nothing about how they came to be.

A plan is all that the daemon needs. It is written beside the run's logs, so that a daemon or its successor never reads
a profile that was edited in the meantime. Loads no engine setting, which keeps the daemon small.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from grpo_engine.errors import PeerError
from grpo_tui.services.base import Launch
from grpo_tui.services.hook import Hook

PLAN_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Services in start order, as the daemon carries them out."""

    version: int = PLAN_VERSION
    profile_name: str
    profile_folder: Path
    """Where hooks run."""
    launches: tuple[Launch, ...]
    hooks: tuple[Hook, ...] = ()
    take_ports: bool = False
    """The word to end strangers of our own user that hold a declared port when a service is started first."""

    def to_json(self) -> str:
        """The plan for the daemon; `from_json` gives it back."""
        return _PLAN.dump_json(self, indent=1, exclude_defaults=False).decode()

    @staticmethod
    def from_json(text: str, *, where: str = "plan") -> Plan:
        """Read a plan that `to_json` wrote.

        Raises:
            PeerError: damaged, or of another version.
        """
        try:
            plan = _PLAN.validate_json(text)
        except ValidationError as error:
            raise PeerError(f"{where}: damaged, or of another version: {error}") from None
        if plan.version != PLAN_VERSION:
            raise PeerError(f"{where}: of version {plan.version}, this program reads {PLAN_VERSION}")
        return plan


_PLAN = TypeAdapter(Plan)
