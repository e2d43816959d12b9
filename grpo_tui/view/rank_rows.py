"""The ranks of a service as rows: process, GPU, figures, and where each is when it stays there. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_engine.wire.supervisor import RankStatus, ServiceStatus
from grpo_tui.view.format import UNKNOWN, bytes_text, duration_text, percent_text

TITLES = ("pid", "rank", "machine", "gpu", "memory", "gpu memory", "cpu", "place")
OF_GPUS = frozenset({"gpu", "gpu memory"})
OF_NUMBERS = frozenset({*OF_GPUS, "memory", "cpu"})
OF_SOME = frozenset({*OF_GPUS, "machine"})
"""Left out where no rank has one."""


def rank_name(service: str, rank: int) -> str:
    """How a rank is called on all screens: `trainer rank 0`."""
    return f"{service} rank {rank}"


def rank_rows(services: Sequence[ServiceStatus], now: float) -> list[str]:
    """Aligned lines, the titles first; empty where no service has ranks."""
    rows = [_cells(service.name, rank, now) for service in services for rank in service.ranks]
    if not rows:
        return []
    columns = [
        [title, *cells]
        for title, cells in zip(TITLES, zip(*rows, strict=True), strict=True)
        if title not in OF_SOME or any(cell != UNKNOWN for cell in cells)
    ]
    aligned = [_aligned(column) for column in columns]
    return ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]


def _aligned(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [f"{cell:>{width}}" if column[0] in OF_NUMBERS else f"{cell:<{width}}" for cell in column]


def place_text(rank: RankStatus, now: float) -> str:
    """`waits 12s in the all-gather of layer 3 …`; that it runs, where it stays nowhere long."""
    if rank.place is None or rank.since is None:
        return "running"
    verb = "waits" if rank.is_waiting else "for"
    return f"{verb} {duration_text(max(0.0, now - rank.since))} in {rank.place}"


def _cells(service: str, rank: RankStatus, now: float) -> tuple[str, ...]:
    return (
        str(rank.pid),
        rank_name(service, rank.rank),
        rank.machine or UNKNOWN,
        UNKNOWN if rank.gpu is None else str(rank.gpu),
        bytes_text(rank.rss_bytes),
        bytes_text(rank.gpu_memory_bytes),
        percent_text(rank.cpu_percent),
        place_text(rank, now),
    )
