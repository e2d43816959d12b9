"""Checks of the training stack in a profile: models, batches, bridges, metrics. Each yields `dotted.key: what (hint)`.

Not in `loading`, because it imports the settings of the engine, which a profile of commands does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from grpo_engine.bridges.transport.checkpoint import CheckpointSettings
from grpo_engine.models.config import check_model_name
from grpo_tui.profile.model import Profile
from grpo_tui.services.atropos_environment import AtroposEnvironment
from grpo_tui.services.environment import Environment
from grpo_tui.services.inference import Inference
from grpo_tui.services.trainer import Trainer


def _models_exist(profile: Profile) -> Iterator[str]:
    names = {"model.name": profile.model.name} if profile.model else {}
    with_model = Inference | Environment | AtroposEnvironment | Trainer
    for key, service in profile.services.items():
        if isinstance(service, with_model) and service.model_name not in names.values():
            names[f"services.{key}.model_name"] = service.model_name
    for key, name in names.items():
        problem = check_model_name(name)
        if problem:
            yield f"{key}: {problem}"


def _batches_are_whole_groups(profile: Profile) -> Iterator[str]:
    environments = [s for s in profile.services.values() if isinstance(s, Environment | AtroposEnvironment)]
    sizes = {environment.group_size for environment in environments}
    size = sizes.pop() if len(sizes) == 1 else None  # several add up, and an Atropos environment may not set it
    for name, service in profile.services.items():
        if isinstance(service, Trainer) and size is not None and service.sequences_per_batch % size:
            fewer = service.sequences_per_batch // size * size
            nearest = " or ".join(str(each) for each in (fewer, fewer + size) if each)
            yield (
                f"services.{name}.batch_size: {service.batch_size} × gradient_accumulation_steps "
                f"{service.gradient_accumulation_steps} = {service.sequences_per_batch} sequences per batch, not a "
                f"multiple of the environment's group_size {size}, so no batch can form; set the two so that their "
                f"product is {nearest}, or change group_size"
            )


def _shared_weights_have_their_bridge(profile: Profile) -> Iterator[str]:
    servers = [service for service in profile.services.values() if isinstance(service, Inference)]
    sharing = [server for server in servers if server.shared_weights]
    for name, service in profile.services.items():
        if not isinstance(service, Trainer) or not service.bridge.shares_memory:
            continue
        if servers and not sharing:
            mode = service.bridge.mode
            yield f"services.{name}.bridge.mode: {mode}, but no inference service has shared_weights = true"
        if any(server.dtype != service.dtype for server in sharing):
            yield f"services.{name}.dtype: {service.dtype}, but the shared weights differ: set it once, in [model]"


def _a_server_to_restart_has_a_name(profile: Profile) -> Iterator[str]:
    for name, service in profile.services.items():
        if not isinstance(service, Trainer):
            continue
        if not isinstance(service.bridge, CheckpointSettings) or not service.bridge.restart:
            continue
        server = service.inference_service
        if server not in profile.services:
            yield (
                f"services.{name}.inference_service: {server!r} is not a service here, and bridge.restart needs it "
                f"(set it to the inference service, or remove restart)"
            )
        elif server in service.restart_with:
            yield (
                f"services.{name}.restart_with: {server!r}, which this trainer restarts (bridge.restart), so it would "
                f"restart itself: remove one of the two"
            )


def _trainer_alone_writes_metrics(profile: Profile) -> Iterator[str]:
    services = profile.services.items()
    writers = [f"services.{name}" for name, each in services if isinstance(each, Trainer) and each.run_folder is None]
    consoles = [f"services.{name}.console" for name, service in services if service.console]
    for key in (*writers[1:], *consoles) if writers else ():
        yield (
            f"{key}: metrics.jsonl has one writer, which is {writers[0]} (a trainer always writes it); remove this one"
        )


def _environments_of_atropos_can_work(profile: Profile) -> Iterator[str]:
    services = profile.services
    of_atropos = {name: service for name, service in services.items() if isinstance(service, AtroposEnvironment)}
    most = max((service.training_steps for service in services.values() if isinstance(service, Trainer)), default=0)
    for name, environment in of_atropos.items():
        if environment.total_steps is not None and 0 <= environment.total_steps < most:
            yield (
                f"services.{name}.total_steps: {environment.total_steps}, but the trainer runs {most}, and would wait "
                f"endlessly for an environment that has finished: remove it"
            )


STACK_CHECKS: tuple[Callable[[Profile], Iterator[str]], ...] = (
    _models_exist,
    _batches_are_whole_groups,
    _shared_weights_have_their_bridge,
    _a_server_to_restart_has_a_name,
    _trainer_alone_writes_metrics,
    _environments_of_atropos_can_work,
)
