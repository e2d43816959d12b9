"""What parameter services of other machines say to the one that they fetch from; a trainer asks that one alone.

A service reports several times a second, also while it fetches. One that is silent is left out: its machine may be
lost, and its servers count as away until they are seen somewhere again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from grpo_engine.wire.parameters import MachineReport, ParametersState, ServedBy

REPORT_EVERY_S = 0.2
SILENT_AFTER_S = 5.0
FORGOTTEN_AFTER_S = 60.0


class OtherMachines:
    """The last report of each."""

    def __init__(self, server_urls: Sequence[str] = ()) -> None:
        """
        Args:
            server_urls: of the servers of all machines, where they are known; one that no machine has is away.
        """
        self._server_urls = tuple(server_urls)
        self._lock = threading.Lock()
        self._reports: dict[str, tuple[float, MachineReport]] = {}
        """By machine, with the time."""

    def take(self, report: MachineReport) -> None:
        """Keep a report."""
        now_s = time.monotonic()
        with self._lock:
            self._reports[report.machine] = now_s, report
            known = self._reports.items()
            self._reports = {name: each for name, each in known if now_s - each[0] < FORGOTTEN_AFTER_S}

    def with_them(self, state: ParametersState) -> ParametersState:
        """The state of this machine's service, with the servers of all that are not silent."""
        now_s = time.monotonic()
        with self._lock:
            reports = [each for at_s, each in self._reports.values() if now_s - at_s < SILENT_AFTER_S]
        servers = [*state.servers, *(server for each in reports for server in each.state.servers)]
        known = {each.url for each in servers}
        servers += [
            ServedBy(url=url, policy_version=None, is_away=True) for url in self._server_urls if url not in known
        ]
        late = [words for each in reports if (words := _why_late(each, state)) is not None]
        problems = [f"{each.machine}: {each.state.problem}" for each in reports if each.state.problem]
        return state.model_copy(
            update={
                "servers": servers,
                "is_settled": state.is_settled and not late,
                "longest_s": max([state.longest_s, *(each.state.longest_s for each in reports)]),
                "problem": state.problem or (problems[0] if problems else ""),
                "late": late,
            }
        )


def _why_late(report: MachineReport, state: ParametersState) -> str | None:
    """Why a machine is waited for; None where its servers have what is due to them, or none of them answers."""
    if all(each.is_away for each in report.state.servers):
        return None
    if (report.source_instance, report.source_number) != (state.instance, state.number):
        why = report.fault or "it is being fetched"
        return f"{report.machine} does not have version {state.policy_version} yet ({why})"
    if not report.state.is_settled:
        return f"servers of {report.machine} are loading version {state.policy_version}"
    return None
