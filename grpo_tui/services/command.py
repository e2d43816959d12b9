"""Any command as a service."""

from __future__ import annotations

from typing import Literal

from grpo_tui.services.base import ARGV, Launch, Place, RestartInPlace, Service


class Command(Service):
    """A program with its arguments; never a shell string."""

    kind: Literal["command"]
    argv: ARGV
    """Program and arguments."""
    restart_in_place: RestartInPlace | None = None
    """How it is restarted while its process stays; unset: it is stopped and started."""

    @property
    def final_exit_codes(self) -> tuple[int, ...]:
        """None: the exit codes of other programs are not known."""
        return ()

    def launch(self, name: str, place: Place) -> Launch:
        """Start `argv` unchanged."""
        return self._launch(name, self.kind, place, argv=self.argv, restart_in_place=self.restart_in_place)
