"""What this server changes in vLLM's own code: which patch is needed where, and whether each one is in place.

The patches themselves stand where they are applied, each one function with its reason and versions; each leaves a mark,
and the server does not serve without those that its settings call for. Imports nothing of vLLM, and no patch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from grpo_engine.errors import ModelError
from grpo_engine.server.config import ServerConfig


class Patch(StrEnum):
    """Every one there is."""

    KEEP_CPU_WEIGHTS = "keep_cpu_weights"
    """In the workers (`vllm_worker.py`): compute with the weights themselves, not with repacked copies."""
    WATCH_SERVER = "watch_server"
    """In the workers: end with the server."""
    HEAR_OUTPUTS = "hear_outputs"
    """In the server (`vllm_engine.py`): learn of every message of the engine core."""


_WITHOUT = {
    Patch.KEEP_CPU_WEIGHTS: "it would compute with copies of the weights, and never see what a trainer writes",
    Patch.WATCH_SERVER: "its processes would outlive a server that is killed, and hold the memory",
    Patch.HEAR_OUTPUTS: "a pause could not tell when all tokens have arrived, nor health whether the engine hangs",
}


def needed_patches(config: ServerConfig, *, is_cpu: bool) -> frozenset[Patch]:
    """Those that these settings call for."""
    needed = {Patch.WATCH_SERVER, Patch.HEAR_OUTPUTS}
    if is_cpu and config.shared_weights:
        needed.add(Patch.KEEP_CPU_WEIGHTS)
    return frozenset(needed)


def check_patches(
    needed: Iterable[Patch], in_server: Mapping[str, bool], in_workers: Iterable[Mapping[str, bool]], version: str
) -> dict[str, bool]:
    """See that every patch that is needed is in place, in the server or in all of its workers.

    Returns:
        Every patch, and whether it is in place.

    Raises:
        ModelError: one that is needed is not.
    """
    workers = list(in_workers)
    in_place = {
        str(patch): in_server.get(patch, False) or (bool(workers) and all(each.get(patch, False) for each in workers))
        for patch in Patch
    }
    if missing := [patch for patch in needed if not in_place[patch]]:
        reasons = "; ".join(f"{patch} ({_WITHOUT[patch]})" for patch in sorted(missing))
        raise ModelError(
            f"vLLM {version}: changes to its code are not in place: {reasons}. Nothing is served: install a vLLM from "
            "0.26 to 0.33 as it was published"
        )
    return in_place
