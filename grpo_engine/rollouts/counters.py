"""What the rollout API counts since its start, and `/metrics`: plain text in Prometheus' format."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from grpo_engine.rollouts.ledger import Ledger


@dataclass(slots=True)
class Counters:
    """Counts since the process started."""

    groups: Counter[str] = field(default_factory=Counter)
    """By environment."""
    sequences: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """By reason."""
    stale: int = 0
    """Groups that were dropped because they had grown older than allowed."""
    batches: int = 0
    batches_repeated: int = 0
    held: int = 0

    def took_in(self, environment: str, num_sequences: int, num_bytes: int) -> None:
        """Count one group."""
        self.groups[environment] += 1
        self.sequences[environment] += num_sequences
        self.bytes[environment] += num_bytes


def as_text(counters: Counters, ledger: Ledger, *, num_held: int, now: float) -> str:
    """All counters and gauges, one a line."""
    lines: list[str] = []

    def add(name: str, kind: str, help_text: str, values: dict[str, float]) -> None:
        lines.extend((f"# HELP grpo_api_{name} {help_text}", f"# TYPE grpo_api_{name} {kind}"))
        lines.extend(f"grpo_api_{name}{labels} {value:g}" for labels, value in values.items())

    add("groups_total", "counter", "Groups received.", _labelled("environment", counters.groups))
    add("sequences_total", "counter", "Sequences received.", _labelled("environment", counters.sequences))
    add("group_bytes_total", "counter", "Bytes of groups received.", _labelled("environment", counters.bytes))
    add("refused_total", "counter", "Requests refused.", _labelled("reason", counters.refused))
    add("stale_groups_total", "counter", "Groups dropped for their age.", {"": counters.stale})
    add("batches_total", "counter", "Batches handed out.", {"": counters.batches})
    add("batches_repeated_total", "counter", "Batches offered again.", {"": counters.batches_repeated})
    add("held_total", "counter", "Posts that had to wait for room.", {"": counters.held})
    add("held", "gauge", "Posts that wait for room.", {"": num_held})
    add("queued_groups", "gauge", "Groups that wait.", {"": len(ledger.queue)})
    add("queued_sequences", "gauge", "Sequences that wait.", {"": ledger.num_waiting_sequences()})
    add("queued_bytes", "gauge", "Bytes that wait.", {"": ledger.num_waiting_bytes()})
    add("leases", "gauge", "Batches handed out and not acknowledged.", {"": len(ledger.leases)})
    add("live_environments", "gauge", "Environments heard of lately.", {"": len(ledger.live_environments(now))})
    add("step", "gauge", "Batches of this run handed out.", {"": ledger.run.step if ledger.run else 0})
    return "\n".join(lines) + "\n"


def _labelled(label: str, counts: Counter[str]) -> dict[str, float]:
    return {f'{{{label}="{_escaped(value)}"}}': count for value, count in sorted(counts.items())}


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
