"""Which policy versions the groups between sampling and training have, beside the one that is served. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_engine.wire.supervisor import RunStatus, ServiceState, VersionsInFlight


def versions_of(status: RunStatus) -> dict[str, VersionsInFlight]:
    """What rollout APIs report, by their names."""
    ready = (each for each in status.services if each.state is ServiceState.READY)
    return {each.name: each.versions for each in ready if each.versions is not None}


def version_words(versions: VersionsInFlight) -> Iterator[tuple[str, str]]:
    """What, and its figures: `served 120`, `sampling 12 groups`, `queued 120: 4, 119: 16`."""
    yield "served", f"{versions.newest:,}"
    yield "sampling", f"{versions.num_sampled} group{'' if versions.num_sampled == 1 else 's'}"
    queued = [f"{version:,}: {versions.queued[version]}" for version in sorted(versions.queued, reverse=True)]
    if versions.num_older:
        queued.append(f"older: {versions.num_older}")
    if versions.num_unversioned:
        queued.append(f"unknown: {versions.num_unversioned}")
    yield "queued", ", ".join(queued) or "none"
