"""Counters of the rollout API since its start, and the answer of `/metrics` in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from grpo_engine.rollouts.backpressure import Admission
from grpo_engine.rollouts.state.api_state import ApiState

MAX_ENVIRONMENTS_NAMED = 1000
"""`/metrics` is answered without the token, and each registration of an environment has a name of its own."""
OTHERS = "others"
"""The label of those that came later."""


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
    """Groups that were dropped because they exceeded max_staleness."""
    evicted: int = 0
    """Groups that newer ones replaced in a window or buffer."""
    batches: int = 0
    batches_repeated: int = 0

    def add_group(self, environment: str, num_sequences: int, num_bytes: int) -> None:
        """Count one group."""
        if environment not in self.groups and len(self.groups) >= MAX_ENVIRONMENTS_NAMED:
            environment = OTHERS
        self.groups[environment] += 1
        self.sequences[environment] += num_sequences
        self.bytes[environment] += num_bytes


def metrics_text(counters: Counters, state: ApiState, admission: Admission, *, now: float) -> bytes:
    """All counters and gauges in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(counters, state, admission, now=now))
    return generate_latest(registry)


class _Snapshot(Collector):
    """The metrics at one moment; families instead of `Counter` objects, which would add `_created` series."""

    def __init__(self, counters: Counters, state: ApiState, admission: Admission, *, now: float) -> None:
        self._by_label: list[tuple[str, str, str, Counter[str]]] = [
            ("groups", "Groups received.", "environment", counters.groups),
            ("sequences", "Sequences received.", "environment", counters.sequences),
            ("group_bytes", "Bytes of groups received.", "environment", counters.bytes),
            ("refused", "Requests refused.", "reason", counters.refused),
        ]
        self._counts: list[tuple[str, str, int]] = [
            ("stale_groups", "Groups dropped because of max_staleness.", counters.stale),
            ("evicted_groups", "Groups that newer ones replaced in a window or buffer.", counters.evicted),
            ("batches", "Batches delivered.", counters.batches),
            ("batches_repeated", "Batches offered again.", counters.batches_repeated),
            ("held", "Posts that waited for room in the queue.", admission.num_ever_held),
        ]
        num_live = len(state.environments.live(now).records)
        self._gauges: list[tuple[str, str, int]] = [
            ("held", "Posts that wait for room in the queue.", admission.num_held),
            ("queued_groups", "Groups in the queue.", len(state.queue)),
            ("queued_sequences", "Sequences in the queue.", state.num_waiting_sequences()),
            ("queued_bytes", "Bytes in the queue.", state.num_waiting_bytes()),
            ("leases", "Batches delivered and not acknowledged.", len(state.leases)),
            ("live_environments", "Environments that sent a request lately.", num_live),
            ("step", "Batches of this run delivered.", state.run.step if state.run else 0),
        ]

    def collect(self) -> Iterable[Metric]:
        """One family per metric; a counter's samples get the suffix `_total`."""
        for name, text, label, values in self._by_label:
            family = CounterMetricFamily(f"grpo_api_{name}", text, labels=[label])
            for value, count in sorted(values.items()):
                family.add_metric([value], count)
            yield family
        for name, text, count in self._counts:
            yield CounterMetricFamily(f"grpo_api_{name}", text, value=count)
        for name, text, count in self._gauges:
            yield GaugeMetricFamily(f"grpo_api_{name}", text, value=count)
