"""Settings of services that contradict each other, whatever the services are; `stack_checks` has the training stack.

Each check yields lines `dotted.key: what is wrong (what to do)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter

from grpo_engine.config import did_you_mean
from grpo_tui.profile.cluster import check_cluster
from grpo_tui.profile.model import Profile
from grpo_tui.services.base import MAX_ENV_FILE_BYTES, NeedCondition, RestartPolicy
from grpo_tui.services.command import Command

MAX_ENV_FILES_BYTES = 4 * 1024 * 1024
"""Of all services; 256 replicas may have 16 kB each."""
LEAST_ENV_FILE_BYTES = 1024
"""That each counts for."""


def is_of_commands(profile: Profile) -> bool:
    """Whether a profile has nothing of the training stack."""
    return profile.model is None and all(isinstance(service, Command) for service in profile.services.values())


def _needs_name_services(profile: Profile) -> Iterator[str]:
    for name, service in profile.services.items():
        for needed in service.needs:
            if needed not in profile.services:
                hint = did_you_mean(needed, profile.services)
                yield f"services.{name}.needs: {needed!r} is not a service here{hint}"


def _hooks_name_services(profile: Profile) -> Iterator[str]:
    for index, hook in enumerate(profile.hooks):
        for name in hook.services:
            if name not in profile.services:
                yield f"hooks.{index}.services: {name!r} is not a service here{did_you_mean(name, profile.services)}"


def _restart_with_is_needed(profile: Profile) -> Iterator[str]:
    """A service that is restarted after another waits for it as at the first start, so it must be among its needs."""
    for name, service in profile.services.items():
        for leader in service.restart_with:
            if leader not in profile.services:
                hint = did_you_mean(leader, profile.services)
                yield f"services.{name}.restart_with: {leader!r} is not a service here{hint}"
            elif leader not in service.needs:
                yield (
                    f"services.{name}.restart_with: {leader!r} is not among its needs, so both would start at once "
                    f'(add needs = {{ {leader} = "ready" }})'
                )


def _opponents_are_policies(profile: Profile) -> Iterator[str]:
    """An environment that names an opponent has inference servers of it."""
    policies = {policy for each in profile.services.values() if (policy := getattr(each, "policy", None)) is not None}
    for name, service in profile.services.items():
        opponent = getattr(service, "opponent", None)
        if opponent is None:
            continue
        if opponent not in policies:
            there = f"; there are {', '.join(sorted(policies))}" if policies else ": no service has policy set"
            yield f"services.{name}.opponent: {opponent!r} is no policy here{did_you_mean(opponent, policies)}{there}"
        elif opponent == getattr(service, "policy", None):
            yield f"services.{name}.opponent: {opponent!r} is the policy of this environment: name the other one"
        elif not getattr(service, "opponent_urls", ()):
            yield (
                f"services.{name}.opponent: {opponent!r} has no service of kind inference, which would play: add one "
                f"with policy = {opponent!r}"
            )


def _needs_have_no_cycle(profile: Profile) -> Iterator[str]:
    graph = {name: [n for n in service.needs if n in profile.services] for name, service in profile.services.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        path = " → ".join(reversed(error.args[1]))
        yield f"services.{error.args[1][-1]}.needs: a cycle, so none of these can start first: {path}"


def _finished_needs_can_finish(profile: Profile) -> Iterator[str]:
    for name, service in profile.services.items():
        for needed, condition in service.needs.items():
            other = profile.services.get(needed)
            if condition is NeedCondition.FINISHED and other and other.restart is RestartPolicy.ALWAYS:
                yield f"services.{name}.needs.{needed}: never finishes, its restart is 'always'"


def _ports_are_used_once(profile: Profile) -> Iterator[str]:
    users: dict[int, list[str]] = {}
    for name, service in profile.services.items():
        port = getattr(service, "port", None)
        own = () if port is None else (port,)
        for port, count in Counter((*own, *service.ports)).items():
            users.setdefault(port, []).extend([name] * (count if port not in own else 1))
    for port, names in users.items():
        if len(names) > 1:
            first, second = names[:2]
            key = "ports" if first == second else "port"
            yield f"services.{second}.{key}: {port} is already the port of services.{first}"


def _one_console_of_metrics(profile: Profile) -> Iterator[str]:
    first, *others = [name for name, service in profile.services.items() if service.console] or [""]
    for name in others:
        yield (
            f"services.{name}.console: metrics.jsonl has one writer, which is services.{first}.console; remove one of "
            f"the two"
        )


def _console_metrics_have_a_step(profile: Profile) -> Iterator[str]:
    for name, service in profile.services.items():
        if service.console and "step" not in service.console:
            yield (
                f"services.{name}.console: no pattern for 'step' among {', '.join(service.console)}: without it, "
                f"values belong to no step; add a pattern for the line that opens one, as in step = '^Step (\\d+)'"
            )


def _env_files_are_short(profile: Profile) -> Iterator[str]:
    """Each is read for every service that names it, and its variables are in the plan once for each."""
    total = 0
    for name, service in profile.services.items():
        for file in service.env_files:
            try:
                total += min(max(file.stat().st_size, LEAST_ENV_FILE_BYTES), MAX_ENV_FILE_BYTES)
            except OSError:
                continue  # named when it is read, as a longer one is
            if total > MAX_ENV_FILES_BYTES:
                yield f"services.{name}.env_files: those of all services are longer than {MAX_ENV_FILES_BYTES:,} bytes"
                return


def checks_for(profile: Profile) -> tuple[Check, ...]:
    """The checks here, and those of the training stack where a profile has any of it."""
    if is_of_commands(profile):
        return CHECKS
    from grpo_tui.profile.stack_checks import STACK_CHECKS

    return (*CHECKS, *STACK_CHECKS)


Check = Callable[[Profile], Iterator[str]]
CHECKS: tuple[Check, ...] = (
    _needs_name_services,
    _hooks_name_services,
    _restart_with_is_needed,
    _opponents_are_policies,
    _needs_have_no_cycle,
    _finished_needs_can_finish,
    _ports_are_used_once,
    _one_console_of_metrics,
    _console_metrics_have_a_step,
    _env_files_are_short,
    check_cluster,
)
