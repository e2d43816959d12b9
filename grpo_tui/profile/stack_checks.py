"""Checks of the training stack in a profile: models, batches, bridges, metrics. Each yields `dotted.key: what (hint)`.

Not in `loading`, because it imports the settings of the engine, which a profile of commands does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from grpo_engine.bridges import TO_MANY_SERVERS
from grpo_engine.bridges.transport.checkpoint import CheckpointSettings
from grpo_engine.models.config import check_model_name, why_not_splittable
from grpo_tui.profile.hub import known_config
from grpo_tui.profile.model import Profile
from grpo_tui.services.atropos_environment import AtroposEnvironment
from grpo_tui.services.command import Command
from grpo_tui.services.environment import Environment
from grpo_tui.services.inference import Inference
from grpo_tui.services.parameters import Parameters
from grpo_tui.services.reference import Reference
from grpo_tui.services.rollout_api import RolloutApi
from grpo_tui.services.trainer import Trainer


def _models_exist(profile: Profile) -> Iterator[str]:
    names = {"model.name": profile.model.name} if profile.model else {}
    with_model = Inference | Environment | AtroposEnvironment | Trainer | Reference
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


def _completions_leave_room_for_a_prompt(profile: Profile) -> Iterator[str]:
    """Only where `max_tokens` is set: unset, a completion is as long as there is room."""
    services = profile.services.items()
    limits = {f"services.{name}.seq_len": each.seq_len for name, each in services if isinstance(each, Trainer)}
    limits |= {f"services.{name}.max_model_len": e.max_model_len for name, e in services if isinstance(e, Inference)}
    for name, environment in services:
        if not isinstance(environment, Environment) or "max_tokens" not in environment.model_fields_set:
            continue
        for key, limit in limits.items():
            if environment.max_tokens >= limit:
                yield (
                    f"services.{name}.max_tokens: {environment.max_tokens} leaves no room for a prompt within {key} "
                    f"{limit}: lower it, or raise model.max_model_len"
                )
                break


def _servers_of(profile: Profile, trainer: Trainer) -> dict[str, Inference]:
    """The inference services of a trainer's policy."""
    services = profile.services.items()
    return {name: each for name, each in services if isinstance(each, Inference) and each.policy == trainer.policy}


def _shared_weights_have_their_bridge(profile: Profile) -> Iterator[str]:
    for name, service in profile.services.items():
        if not isinstance(service, Trainer) or not service.bridge.shares_memory:
            continue
        servers = [*_servers_of(profile, service).values()]
        sharing = [server for server in servers if server.shared_weights]
        if servers and not sharing:
            mode = service.bridge.mode
            yield f"services.{name}.bridge.mode: {mode}, but no inference service has shared_weights = true"
        if any(server.dtype != service.dtype for server in sharing):
            yield f"services.{name}.dtype: {service.dtype}, but the shared weights differ: set it once, in [model]"


def _shared_memory_is_of_the_same_gpus(profile: Profile) -> Iterator[str]:
    """Each rank of a trainer that shares memory maps that of one process of the server, on the same GPU."""
    for name, service in profile.services.items():
        if not isinstance(service, Trainer) or not service.bridge.shares_memory:
            continue
        for server_name, server in _servers_of(profile, service).items():
            if server.shared_weights:
                yield from _shared_memory_of(name, service, server_name, server)


def _shared_memory_of(name: str, trainer: Trainer, server_name: str, server: Inference) -> Iterator[str]:
    mode, size = trainer.bridge.mode, server.tensor_parallel_size
    where = f"services.{server_name}.tensor_parallel_size: {size}, and"
    are_on_gpus = "cpu" not in (trainer.device, server.device)
    if size > 1 and not trainer.bridge.trains_over_ranks:
        yield (
            f"{where} bridge.mode {mode} maps the whole weights of one GPU: set it to 1, or bridge.mode to shared_vllm "
            "with the trainer on the same GPUs, or to broadcast with the trainer on another GPU"
        )
        return
    config = known_config(server.model_name) if size > 1 else None
    if config is not None and (problem := why_not_splittable(config, size)) is not None:
        yield f"{where} bridge.mode {mode}: {problem}"
    if trainer.num_ranks != size:
        gpus = list(server.gpus or range(size))
        ranks = f"{trainer.num_ranks} rank{'s' if trainer.num_ranks > 1 else ''}"
        remedy = f"services.{name}.gpus = {gpus}" if are_on_gpus else f"services.{name}.processes = {size}"
        yield (
            f"services.{name}.{'gpus' if trainer.gpus else 'processes'}: {ranks}, and "
            f"services.{server_name}.tensor_parallel_size is {size}: with bridge.mode {mode} each rank maps the "
            f"weights of one process of the server: set {remedy}, or tensor_parallel_size to {trainer.num_ranks}"
        )
    elif are_on_gpus and (trainer.gpus or size > 1):
        wanted = list(server.gpus or range(size))
        if list(trainer.gpus or ()) != wanted:
            there = list(server.gpus) if server.gpus else "not set, so the first"
            yield (
                f"services.{name}.gpus: {list(trainer.gpus or ())}, and services.{server_name}.gpus is {there}: "
                f"bridge.mode {mode} maps the memory of the server's GPUs, in their order: set both to the same, or "
                "bridge.mode to broadcast, none or lora_only"
            )


def _turns_are_taken_on_one_gpu(profile: Profile) -> Iterator[str]:
    """A server that sleeps during steps is on the trainer's GPU, through which its weights are handed over."""
    for name, service in profile.services.items():
        if not isinstance(service, Trainer) or not service.bridge.takes_turns or service.device == "cpu":
            continue
        for server_name, server in _servers_of(profile, service).items():
            ours, theirs = list(service.gpus or (0,)), list(server.gpus or (0,))
            if server.device != "cpu" and ours != theirs:
                yield (
                    f"services.{name}.gpus: {ours}, and services.{server_name}.gpus is {theirs}: with bridge.mode "
                    f"{service.bridge.mode} both have the memory of one GPU in turn: set both to the same, or "
                    "bridge.mode to broadcast"
                )


def _a_server_to_restart_has_a_name(profile: Profile) -> Iterator[str]:
    for name, service in profile.services.items():
        if not isinstance(service, Trainer):
            continue
        if not isinstance(service.bridge, CheckpointSettings) or not service.bridge.restart:
            continue
        at = f"services.{name}"
        if not service.inference_service:
            yield (
                f"{at}.inference_service: not set, and bridge.restart needs it (set it to the inference service, or "
                f"remove restart)"
            )
        for server in service.inference_service:
            if server not in profile.services:
                yield (
                    f"{at}.inference_service: {server!r} is not a service here, and bridge.restart needs it "
                    f"(set it to the inference service, or remove restart)"
                )
            elif server in service.restart_with:
                yield (
                    f"{at}.restart_with: {server!r}, which this trainer restarts (bridge.restart), so it would "
                    f"restart itself: remove one of the two"
                )


def _weights_reach_every_server(profile: Profile) -> Iterator[str]:
    """`loading` names the servers to a trainer that names none itself, unless its mode is of one server."""
    services = profile.services.items()
    for name, service in services:
        if not isinstance(service, Trainer) or service.model_fields_set & {"vllm_port", "server_urls"}:
            continue
        of_policy = _servers_of(profile, service).items()
        servers = [server for server, each in of_policy if each.model_name == service.model_name]
        if len(servers) > 1:
            yield (
                f"bridge.mode: {service.bridge.mode} updates one server, and there are {', '.join(servers)}: choose "
                f"{', '.join(TO_MANY_SERVERS)}, keep one of them (replicas = 1), or set services.{name}.vllm_port to "
                "that of the one to update"
            )


def _no_service_is_idle_beside_a_trainer_that_samples(profile: Profile) -> Iterator[str]:
    services = profile.services.items()
    sampling = {n: each for n, each in services if isinstance(each, Trainer) and each.bridge.samples_in_process}
    for trainer_name, trainer in sampling.items():
        for name, service in services:
            if isinstance(service, RolloutApi | Environment | AtroposEnvironment) or (
                isinstance(service, Inference) and service.model_name == trainer.model_name
            ):
                what = f"its task is services.{trainer_name}.environment.task, and " if "env" in service.kind else ""
                yield (
                    f"services.{name}.kind: {service.kind}, and with bridge.mode {trainer.bridge.mode} the trainer "
                    f"samples itself: {what}nothing would use this service: remove it, or choose another bridge.mode"
                )


def _a_parameter_service_has_its_bridge(profile: Profile) -> Iterator[str]:
    trainers = [service for service in profile.services.values() if isinstance(service, Trainer)]
    have_any = any(trainer.bridge.has_parameter_services for trainer in trainers)
    for name, service in profile.services.items():
        if isinstance(service, Parameters) and trainers and not have_any:
            yield (
                f"services.{name}.kind: parameters, and with bridge.mode {trainers[0].bridge.mode} nothing is pushed "
                "to it: set bridge.mode to parameter_service, or remove this service"
            )


def _one_server_writes_a_bridge_file(profile: Profile) -> Iterator[str]:
    writers: dict[tuple[str | None, Path | None], str] = {}
    for name, service in profile.services.items():
        if isinstance(service, Inference) and service.shared_weights:
            policy = service.policy if service.bridge_file is None else None
            first = writers.setdefault((policy, service.bridge_file), name)
            if first != name:
                yield (
                    f"services.{name}.bridge_file: {service.bridge_file or 'unset'}, as for services.{first}, which "
                    f"shares its weights too: set another for one of the two"
                )


def _trainer_alone_writes_metrics(profile: Profile) -> Iterator[str]:
    services = profile.services.items()
    trainers = {name: each for name, each in services if isinstance(each, Trainer) and each.run_folder is None}
    first: dict[str | None, str] = {}
    for name, trainer in trainers.items():
        if (writer := first.setdefault(trainer.policy, name)) != name:
            yield (
                f"services.{name}: metrics.jsonl has one writer, which is services.{writer} (a trainer always writes "
                "it): remove this one, or where it trains another policy, name that in `policy` of its trainer, "
                "rollout API and inference servers"
            )
    for name, service in services:
        if service.console and None in first:
            yield (
                f"services.{name}.console: metrics.jsonl has one writer, which is services.{first[None]} (a trainer "
                "always writes it); remove this one"
            )


def _policies_are_whole(profile: Profile) -> Iterator[str]:
    """A trainer of a named policy has that policy's rollout API and servers; the defaults would be another one's."""
    services = profile.services.items()
    apis = {each.policy for _, each in services if isinstance(each, RolloutApi)}
    trainers = {name: each for name, each in services if isinstance(each, Trainer)}
    for name, trainer in trainers.items():
        if trainer.policy is None or trainer.bridge.samples_in_process:
            continue
        if trainer.policy not in apis and "atropos_url" not in trainer.model_fields_set:
            yield f"services.{name}.policy: {trainer.policy!r}, and no rollout_api is of it: set its policy to the same"
        if not _servers_of(profile, trainer) and not trainer.model_fields_set & {"vllm_port", "server_urls"}:
            yield f"services.{name}.policy: {trainer.policy!r}, and no inference service is: set its policy to the same"
    trained = {trainer.policy for trainer in trainers.values()}
    for name, service in services:
        if not isinstance(service, Environment) or service.opponent is None or service.opponent in trained:
            continue
        if service.opponent in apis and not any(isinstance(each, Command) for _, each in services):
            yield (
                f"services.{name}.opponent: {service.opponent!r} has a rollout_api and no trainer, for which the "
                "environment would wait endlessly: add a trainer of that policy, or remove its rollout_api"
            )


def _stores_are_of_one_api(profile: Profile) -> Iterator[str]:
    services = profile.services.items()
    apis = {name: each for name, each in services if isinstance(each, RolloutApi) and each.store is None}
    first: dict[str | None, str] = {}
    for name, api in apis.items():
        if (owner := first.setdefault(api.policy, name)) != name:
            yield (
                f"services.{name}.store: unset, as for services.{owner}, so both would write one file: name in "
                "`policy` the one that it is of, or set another store"
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
    _completions_leave_room_for_a_prompt,
    _shared_weights_have_their_bridge,
    _shared_memory_is_of_the_same_gpus,
    _turns_are_taken_on_one_gpu,
    _a_server_to_restart_has_a_name,
    _weights_reach_every_server,
    _no_service_is_idle_beside_a_trainer_that_samples,
    _a_parameter_service_has_its_bridge,
    _one_server_writes_a_bridge_file,
    _trainer_alone_writes_metrics,
    _policies_are_whole,
    _stores_are_of_one_api,
    _environments_of_atropos_can_work,
)
