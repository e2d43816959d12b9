"""The likely cause when a GPU is full: from memory history, crash messages and the memory plan. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from grpo_engine.wire.log_lines import GPU_MEMORY_MISSING, OUT_OF_GPU_MEMORY
from grpo_engine.wire.supervisor import GpuStatus, ServiceStatus
from grpo_tui.view.format import bytes_text, duration_text
from grpo_tui.view.gpus.state import OTHERS, UNKNOWN_HOLDER, GpuFigures, GpuMoment, MemoryPlan, PlannedShare
from grpo_tui.view.service_rules import INFERENCE_KIND, TRAINER_KIND

RECENT_S = 300.0
"""Growth within so long counts as the last."""
GROWN_BYTES = 128 << 20
"""Less is the driver's own coming and going."""
MOST_GB = 1e6
"""A larger plan is no memory of a GPU."""
ON_PLAN_SHARE = 0.02
"""Of a GPU: what vLLM holds beside its plan, for CUDA itself."""
NEIGHBOUR_BYTES = 1 << 30
OUT_OF_MEMORY = re.compile(rf"(?i)out of memory|OutOfMemoryError|Free memory on device|{OUT_OF_GPU_MEMORY.pattern}")
"""Errors of torch, vLLM and our trainer."""
ASKED_FOR = re.compile(rf"Tried to allocate ([\d.]+ [KMG]iB)|{GPU_MEMORY_MISSING.pattern}")
REMEDIES: Mapping[str, str] = MappingProxyType(
    {INFERENCE_KIND: "--gpu-memory-utilization", TRAINER_KIND: "--batch-size or --seq-len"}
)
"""By kind of service, where its resolved profile is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Growth of one holder's memory."""

    holder: str
    num_bytes: int
    over_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The likely cause, and what to change."""

    text: str
    hint: str
    has_happened: bool = False
    """Whether a service ran out of memory; otherwise it is a forecast."""


# --- the plan ------------------------------------------------------------------------------------------------------


def memory_plan(document: Mapping[str, Any]) -> MemoryPlan:
    """What a resolved profile (`resolved.json`) says of GPU memory; what it does not say is left out."""
    services = document.get("services")
    if not isinstance(services, Mapping) or not services:
        return MemoryPlan(note="the resolved profile of this run has no services")
    shares: dict[str, PlannedShare] = {}
    remedies: dict[str, str] = {}
    for name, settings in services.items():
        if not isinstance(settings, Mapping):
            continue
        share, size_gb = _share(settings), settings.get("gpu_memory_gb")
        size_bytes = round(size_gb * 1e9) if isinstance(size_gb, int | float) and 0 < size_gb < MOST_GB else None
        if share is not None or size_bytes is not None:
            named = settings.get("gpus")
            gpus = tuple(each for each in named if isinstance(each, int)) if isinstance(named, list | tuple) else ()
            shares[name] = PlannedShare(share=share, gpus=gpus, memory_bytes=size_bytes)
        if (remedy := _remedy(settings)) is not None:
            remedies[name] = remedy
    return MemoryPlan(shares=shares, remedies=remedies)


def planned_on(gpu: GpuStatus, plan: MemoryPlan) -> dict[str, int]:
    """Bytes that the profile gives services of this GPU; one that it gives no GPU counts where it holds memory."""
    total = gpu.memory_total_bytes
    if total is None:
        return {}
    return {
        name: round((each.share or 0) * total) if each.memory_bytes is None else each.memory_bytes
        for name, each in plan.shares.items()
        if gpu.index in each.gpus or (not each.gpus and name in gpu.by_service)
    }


def compared(planned_bytes: int, held_bytes: int | None, total_bytes: int) -> str:
    """How real memory stands to the plan: `holds 36.1G, 12.1G more than planned`."""
    if held_bytes is None:
        return "its use is unknown"
    if not held_bytes:
        return "it uses none"
    beyond = held_bytes - planned_bytes
    if abs(beyond) <= ON_PLAN_SHARE * total_bytes:
        return f"it uses {bytes_text(held_bytes)}, as planned"
    return f"it uses {bytes_text(held_bytes)}, {bytes_text(abs(beyond))} {'more' if beyond > 0 else 'less'}"


def _share(settings: Mapping[str, Any]) -> float | None:
    """The demanded share of a GPU, as the service itself would say it."""
    share = settings.get("gpu_memory_share")
    is_vllm = settings.get("kind") == INFERENCE_KIND and settings.get("engine") == "vllm"
    if share is None and is_vllm and settings.get("device") != "cpu" and settings.get("kv_cache_memory_bytes") is None:
        share = settings.get("gpu_memory_utilization")
    return float(share) if isinstance(share, int | float) and 0 < share <= 1 else None


def _remedy(settings: Mapping[str, Any]) -> str | None:
    """What to lower, with what it is now."""
    if settings.get("kind") == INFERENCE_KIND and settings.get("engine") == "vllm":
        cache = settings.get("kv_cache_memory_bytes")
        if isinstance(cache, int) and 0 < cache < MOST_GB * 1e9:
            return f"--kv-cache-memory-bytes (now {bytes_text(cache)})"
        return f"--gpu-memory-utilization (now {settings.get('gpu_memory_utilization')})"
    if settings.get("kind") != TRAINER_KIND:
        return None
    tokens, length = settings.get("micro_batch_tokens"), settings.get("seq_len")
    if isinstance(tokens, int) and isinstance(length, int) and tokens > length:
        remedy = f"--micro-batch-tokens (now {tokens})"
    else:  # a micro-batch cannot be smaller than a sequence
        remedy = f"--seq-len (now {length})"
    return remedy if settings.get("gradient_checkpointing") else f"{remedy}, or set --gradient-checkpointing"


# --- likely cause --------------------------------------------------------------------------------------------------


def growth(moments: Sequence[GpuMoment], index: int) -> Growth | None:
    """The holder that grew most in the last minutes; None if none did."""
    if not moments or (last := moments[-1].gpu(index)) is None:
        return None
    end = moments[-1].time
    recent = [moment for moment in moments if moment.time >= end - RECENT_S]
    grown: list[Growth] = []
    for holder, held_bytes in last.by_holder.items():
        held_then = [(gpu.by_holder.get(holder, 0), moment.time) for moment in recent if (gpu := moment.gpu(index))]
        least, since = min(held_then, key=lambda each: (each[0], -each[1]))
        if held_bytes - least >= GROWN_BYTES:
            grown.append(Growth(holder=holder, num_bytes=held_bytes - least, over_s=end - since))
    return max(grown, key=lambda each: each.num_bytes, default=None)


def blame(
    gpu: GpuStatus,
    moments: Sequence[GpuMoment],
    services: Sequence[ServiceStatus],
    plan: MemoryPlan,
    ended_at: Mapping[str, float],
) -> Blame:
    """The service that ran out of memory and the holders at that time; else the most likely cause if it happened now.

    Args:
        ended_at: when each service that is down ended, Unix seconds.
    """
    for service in services:
        if service.why and OUT_OF_MEMORY.search(service.why) and _was_on(service, gpu, moments):
            return _of_crash(gpu, service, moments, services, plan, ended_at.get(service.name))
    return _of_now(gpu, moments, services, plan)


def _of_now(gpu: GpuStatus, moments: Sequence[GpuMoment], services: Sequence[ServiceStatus], plan: MemoryPlan) -> Blame:
    if not gpu.are_shares_known or gpu.memory_used_bytes is None:
        return Blame(
            text="if it runs out of memory: use by process is unknown, the driver does not report it here",
            hint=_remedies(services, plan, [each.name for each in services if each.kind in REMEDIES]),
        )
    holders = dict(sorted(_holders(gpu).items(), key=lambda each: -each[1]))
    if not holders:
        return Blame(text="if it runs out of memory: no process uses any now", hint="")
    most = next(iter(holders))
    grown = growth(moments, gpu.index)
    holds = f"{'hold' if most == OTHERS else 'holds'} most ({bytes_text(holders[most])})"
    words = f"{_named(most)} {holds}; none grew lately" if moments else f"{_named(most)} {holds}"
    if grown is not None:
        words = f"{_named(grown.holder)} grew last (+{bytes_text(grown.num_bytes)} in {duration_text(grown.over_s)})"
        words += f" and {holds}" if grown.holder == most else f", {_named(most)} {holds}"
    first = [grown.holder] if grown is not None else []
    return Blame(
        text=f"if it runs out of memory: {words}",
        hint=_remedies(services, plan, list(dict.fromkeys([*first, *holders])), gpu),
    )


def _of_crash(
    gpu: GpuStatus,
    victim: ServiceStatus,
    moments: Sequence[GpuMoment],
    services: Sequence[ServiceStatus],
    plan: MemoryPlan,
    ended_at: float | None,
) -> Blame:
    before = [each for each in moments if (ended_at is None or each.time <= ended_at) and each.gpu(gpu.index)]
    when = "" if ended_at is None else f" at {time.strftime('%H:%M:%S', time.localtime(ended_at))}"
    parts = [f"{victim.name} ran out of memory{when}"]
    asked = ASKED_FOR.search(victim.why or "")
    if asked is not None:
        parts[0] += f", asking for {asked[1] or asked[2]} more"
    then = _fullest_with(victim.name, before, gpu.index)
    holders: dict[str, int] = {}
    if then is not None:
        holders = dict(sorted(then.by_holder.items(), key=lambda each: -each[1]))
        parts.append(
            "just before, " + ", ".join(f"{_named(name)} held {bytes_text(held)}" for name, held in holders.items())
        )
        if then.used_bytes is not None and then.total_bytes is not None:
            parts[-1] += f", {bytes_text(then.total_bytes - then.used_bytes)} were free"
    else:
        parts.append("memory of the other processes was not sampled then; see its crash report (c on screen 1)")
    first = [OTHERS] if holders.get(OTHERS, 0) >= NEIGHBOUR_BYTES else []
    return Blame(
        text="; ".join(parts),
        hint=_remedies(services, plan, list(dict.fromkeys([*first, victim.name, *holders])), gpu),
        has_happened=True,
    )


def _was_on(service: ServiceStatus, gpu: GpuStatus, moments: Sequence[GpuMoment]) -> bool:
    """Whether its memory is this GPU's: it says so, or it was seen there."""
    if service.gpus:
        return gpu.index in service.gpus
    seen = [figures.index for moment in moments for figures in moment.gpus if service.name in figures.by_holder]
    return gpu.index in seen if seen else gpu.index == 0


def _fullest_with(service: str, moments: Sequence[GpuMoment], index: int) -> GpuFigures | None:
    """The last moment at which the service was there; else the last of all."""
    seen = [figures for moment in moments if (figures := moment.gpu(index)) is not None]
    return next((each for each in reversed(seen) if service in each.by_holder), seen[-1] if seen else None)


def _holders(gpu: GpuStatus) -> dict[str, int]:
    held = {name: num_bytes for name, num_bytes in gpu.by_service.items() if num_bytes}
    return {**held, OTHERS: gpu.other_bytes} if gpu.other_bytes else held


def _named(holder: str) -> str:
    return {OTHERS: "processes outside this run", UNKNOWN_HOLDER: "unknown processes"}.get(holder, holder)


def _remedies(
    services: Sequence[ServiceStatus], plan: MemoryPlan, holders: Sequence[str], gpu: GpuStatus | None = None
) -> str:
    """What to do about each of the holders, the first of them first; two are enough."""
    kinds = {service.name: service.kind for service in services}
    found = []
    for holder in holders:
        if holder == OTHERS and gpu is not None and (gpu.other_bytes or 0) >= NEIGHBOUR_BYTES:
            found.append("move to other GPUs (gpus = […] of the services), or ask the other users to free memory")
        elif (flag := plan.remedies.get(holder) or REMEDIES.get(kinds.get(holder, ""))) is not None:
            found.append(f"for {holder} lower {flag}")
    return "; or ".join(found[:2])
