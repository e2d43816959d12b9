"""From a profile, or a recorded run, to what `simulate` needs of it. Pure, but for the folder of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from grpo_engine.errors import ConfigError
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.simulate.figures import (
    SERVER_8B,
    TORCH_SHAPE,
    TRAINER_8B,
    UPDATE_8B_S,
    Figures,
    Lengths,
    ServerSpeed,
    TrainerSpeed,
)
from grpo_engine.simulate.generation import MOST_SEQUENCES
from grpo_engine.simulate.layout import Layout
from grpo_engine.simulate.recording import figures_of, measured_speed, read_recording
from grpo_engine.simulate.result import calibrated
from grpo_engine.simulate.stack import TooLong
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.run_files.resolved import read_resolved

MOST_RECORDED = 1 << 20
"""Sequences, servers, environments … of a recorded run: with more a simulation of it has no end."""
FITTED_WITHIN_S = 120.0
"""Longest time for the simulations by which the speed of recorded servers is found; for usual runs it is seconds."""
ASSUMED_LENGTH_SHARE = 0.4
"""Of `max_tokens`, that a completion has on average where nothing was recorded. An assumption, no measurement."""


def layout_of(loaded: LoadedProfile) -> Layout:
    """The stack of a profile.

    Raises:
        ConfigError: a part is missing that a simulation needs.
    """
    services = loaded.profile.services
    return _layout({name: service.model_dump() for name, service in services.items()}, str(loaded.path))


def gpus_per_server(loaded: LoadedProfile) -> int:
    """GPUs of each inference server."""
    sizes = [getattr(service, "tensor_parallel_size", None) for service in loaded.profile.services.values()]
    return max((size for size in sizes if size), default=1)


def recorded_layout(run_folder: Path) -> Layout:
    """The stack that a run was recorded with.

    Raises:
        ConfigError: its settings cannot be read, or lack a part.
    """
    with _damage_named(run_folder):
        layout = _layout(_recorded_services(run_folder), str(run_folder))
    sizes = {field.name: value for field in fields(layout) if type(value := getattr(layout, field.name)) is int}
    if wrong := {name: value for name, value in sizes.items() if not 0 <= value <= MOST_RECORDED}:
        raise ConfigError(f"{run_folder}: its settings are those of no run: {wrong}")
    return layout


@contextmanager
def _damage_named(run_folder: Path) -> Iterator[None]:
    """What damaged settings of a run raise, as an error for people."""
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{run_folder}: its settings are damaged: {error!r}") from None


def shape_of(services: Mapping[str, Mapping[str, Any]]) -> ServerSpeed:
    """How the speed of a server depends on the number of its requests, by its engine."""
    server = next(service for service in services.values() if service["kind"] == "inference")
    is_torch = server.get("engine") == "torch"
    most = int(server.get("max_batch_size") or 256)
    points = tuple(TORCH_SHAPE if is_torch else SERVER_8B)
    return ServerSpeed(points=points, max_running=most, batching="whole" if is_torch else "continuous")


def assumed_figures(loaded: LoadedProfile) -> Figures:
    """Figures without a recording: those of the 8B shape on H200, and lengths that are assumed.

    Raises:
        ConfigError: the servers of the profile are not of vLLM, for which nothing is measured.
    """
    services = {name: service.model_dump() for name, service in loaded.profile.services.items()}
    speed = shape_of(services)
    speed = replace(speed, max_running=min(speed.max_running, MOST_SEQUENCES))
    if speed.batching == "whole":
        raise ConfigError(
            f"{loaded.path}: engine torch has no measured speed, which depends on model and machine: run the profile "
            "once and name its folder, --from logs/RUN"
        )
    environment = next(service for service in services.values() if service["kind"] == "environment")
    longest = int(environment["max_tokens"])
    mean = ASSUMED_LENGTH_SHARE * longest
    return Figures(
        server=speed,
        trainer=TrainerSpeed(tokens_per_s=TRAINER_8B),
        lengths=Lengths(mean=mean, longest=longest),
        update_s=UPDATE_8B_S,
        sources=(
            "measured on H200 with the 8B Llama shape (docs/benchmarks.md, docs/many-gpus.md): vLLM "
            f"{speed.points[-1][1]:,.0f} tokens/s at {speed.points[-1][0]} sequences, training {TRAINER_8B:,.0f} "
            f"tokens/s a GPU, weight update {1000 * UPDATE_8B_S:.0f} ms",
            f"assumed: completions of {mean:.0f} tokens on average (--length-mean), log-normal, at most {longest}; "
            "prompts and rewards take nothing",
        ),
    )


def recorded_figures(run_folder: Path) -> Figures:
    """Figures of a run, with its server speed fitted to it.

    Raises:
        ConfigError: it is no run, is too short, has no lengths, or takes too long to simulate.
        NoBatch: its settings let no batch form in a simulation.
        TooMany: they have too many sequences sampled ahead.
    """
    recording = read_recording(run_folder)
    layout = recorded_layout(run_folder)
    with _damage_named(run_folder):
        shape = shape_of(_recorded_services(run_folder))
    if not 0 < shape.max_running <= MOST_RECORDED:
        raise ConfigError(f"{run_folder}: its settings are those of no run: max_batch_size {shape.max_running}")
    if shape.batching == "continuous":
        shape = measured_speed(run_folder, shape)
    figures = figures_of(
        recording,
        shape,
        num_ranks=layout.num_ranks,
        batch_size=layout.batch_size,
        shares_device=layout.shares_device,
    )
    until = time.monotonic() + FITTED_WITHIN_S
    try:
        return calibrated(recording, layout, figures, is_late=lambda: time.monotonic() > until)
    except TooLong as error:
        raise ConfigError(
            f"{run_folder}: its servers cannot be fitted within {FITTED_WITHIN_S:g} s ({error}): name the folder of a "
            "run with fewer sequences a step, or give --server-speed and the others instead of --from"
        ) from None


def _recorded_services(run_folder: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        services = read_resolved(run_folder)["services"]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{run_folder}: {error}: name the folder of a run, as logs/tiny-cpu-…") from None
    found: Mapping[str, Mapping[str, Any]] = services
    return found


def _layout(services: Mapping[str, Mapping[str, Any]], where: str) -> Layout:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for service in services.values():
        kinds.setdefault(str(service.get("kind")), []).append(service)
    for kind in ("trainer", "inference", "environment"):
        if kind not in kinds:
            raise ConfigError(
                f"{where}: no service of kind {kind}: simulate takes stacks of our trainer, inference servers and "
                "environments, which sample beside training"
            )
    trainer, environments = kinds["trainer"][0], kinds["environment"]
    sizes = {int(environment["group_size"]) for environment in environments}
    if len(sizes) > 1:
        raise ConfigError(f"{where}: environments with group_size {sorted(sizes)}: simulate takes one size")
    api = {
        key: value
        for key, value in (kinds.get("rollout_api") or [{}])[0].items()
        if key in ("buffer", "buffer_capacity", "buffer_uses", "buffer_sampling", "max_staleness") and value is not None
    }
    config = ApiConfig(**api)
    bounds = [bound for bound in (trainer.get("max_staleness"), config.max_staleness) if bound is not None]
    bridge = trainer.get("bridge") or {}
    return Layout(
        num_servers=sum(int(service.get("replicas") or 1) for service in kinds["inference"]),
        num_ranks=int(trainer.get("processes") or 1),
        num_environments=len(environments),
        batch_size=int(trainer["batch_size"]) * int(trainer.get("gradient_accumulation_steps") or 1),
        group_size=sizes.pop(),
        max_staleness=min(bounds, default=None),
        max_workers=int(environments[0]["max_workers"]),
        max_batches_offpolicy=environments[0].get("max_batches_offpolicy"),
        buffering=config.buffering,
        update_every=int(bridge.get("every_steps") or 1),
        shares_device=bool(_gpus(kinds["trainer"]) & _gpus(kinds["inference"])),
    )


def _gpus(services: Sequence[Mapping[str, Any]]) -> set[Any]:
    return {gpu for service in services for gpu in service.get("gpus") or ()}
