"""What services report of themselves, as long as it is valid: of the running attempt, and recent."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Generic, TypeVar

from grpo_engine.wire.supervisor import REPORT_VALID_S, RanksReport, ServiceReport

ReportT = TypeVar("ReportT", ServiceReport, RanksReport)


@dataclass(frozen=True, slots=True)
class _Received(Generic[ReportT]):
    report: ReportT
    at_s: float


class SelfReports(Generic[ReportT]):
    """The newest report of each service, of one type."""

    def __init__(self, kind: type[ReportT]) -> None:
        self._kind: type[ReportT] = kind
        self._received: dict[str, _Received[ReportT]] = {}

    def take(self, report: ReportT) -> bool:
        """Keep a report; whether it says something else than the one before."""
        before = self._received.get(report.service)
        self._received[report.service] = _Received(report, time.monotonic())
        return before is None or before.report != report

    def of(self, service: str, attempt: int) -> ReportT:
        """The valid report of an attempt; one that says nothing where there is none."""
        received = self._received.get(service)
        is_valid = (
            received is not None
            and received.report.attempt == attempt
            and time.monotonic() - received.at_s <= REPORT_VALID_S
        )
        return received.report if received and is_valid else self._kind(service=service, attempt=attempt)

    def forget_old(self) -> list[str]:
        """Drop reports that are no longer repeated; returns their services."""
        now_s = time.monotonic()
        old = [service for service, received in self._received.items() if now_s - received.at_s > REPORT_VALID_S]
        for service in old:
            del self._received[service]
        return old
