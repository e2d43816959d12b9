"""Verdicts on the server itself: whether the trainer can use it, and what to do where not. Pure."""

from __future__ import annotations

from grpo_engine.check.config import CheckConfig
from grpo_engine.check.sampling import ServerFacts, ServerKind
from grpo_engine.diagnosis.finding import Check, Finding
from grpo_engine.errors import BridgeError, GrpoError, ModelError
from grpo_engine.models.loading import resolve_model
from grpo_engine.train.config import USUAL_DROPOUT


def judge_server(facts: ServerFacts, config: CheckConfig) -> Finding:
    """What the server is, and whether it is what the trainer needs."""
    version = "" if facts.policy_version is None else f", policy version {facts.policy_version}"
    place = "" if facts.device is None else f" on {facts.device} in {facts.dtype}"
    whose = "our server" if facts.kind is ServerKind.OURS else facts.kind.value
    seen = f"{whose}, {facts.engine}{place}{version}; log-probs {facts.logprobs_mode}" + (
        "" if facts.declares_mode else " (not declared; that is its default)"
    )
    if facts.kind is ServerKind.OURS and not can_be_handed_weights(facts, config):
        return Check("server").fail(
            seen,
            cause="the server takes no adapters, which lora_only publishes, so the canary is not checked",
            hint="start it with --enable-lora",
        )
    if not _is_same_model(facts.model_name, config.model_name):
        return Check("server").warn(
            f"{seen}; serves {facts.model_name!r}",
            cause=f"another name than the trainer's {config.model_name!r}; alignment shows whether it is the same",
            hint="start the server with the trainer's --model-name",
        )
    if config.bridge.trains_adapter and config.lora_dropout > USUAL_DROPOUT:
        return Check("server").warn(
            seen,
            cause=f"--lora-dropout {config.lora_dropout:g} makes the trainer disagree with the sampler on every token",
            hint="train with --lora-dropout 0",
        )
    noise = config.bridge.trains_adapter and config.lora_dropout > 0
    return Check("server").ok(f"{seen}; --lora-dropout {config.lora_dropout:g} is noise in training" if noise else seen)


def can_be_handed_weights(facts: ServerFacts, config: CheckConfig) -> bool:
    """Whether the bridge can publish to this server, by what the server declares."""
    return facts.kind is ServerKind.OURS and (
        facts.takes_adapters or not config.bridge.server_settings.get("enable_lora", False)
    )


def no_server(config: CheckConfig, error: GrpoError) -> Finding:
    """No server answers."""
    return Check("server").fail(
        str(error),
        cause="no inference server runs on this port, its model is still loading, or its kind is unknown",
        hint=f"start it (grpo-engine server --model-name {config.model_name} --port {config.vllm_port}), wait until "
        "/health answers 200, or set its port by --vllm-port",
    )


def other_trainer(pid: int) -> Finding:
    """Another trainer uses these weights."""
    return Check("trainer").fail(
        f"process {pid} is running and was the last to write the weights that this server shares",
        cause="a training run uses this server, and a check would change its weights",
        hint="check before training, or with a separate server",
    )


def no_bridge(config: CheckConfig, facts: ServerFacts) -> Finding:
    """A stock server, which no bridge can publish to."""
    return Check("bridge").fail(
        f"a {facts.kind.value} server takes no weight updates, so the canary is not checked",
        cause=f"it has no /bridge/pause and /bridge/reload with versions, which bridge {config.bridge.mode} needs",
        hint=f"serve with grpo-engine server --model-name {config.model_name}; the other checks are still valid",
    )


def no_trainer(config: CheckConfig, error: GrpoError) -> Finding:
    """The bridge does not attach, or the flags do not fit."""
    return Check("trainer").fail(
        str(error),
        cause="the trainer cannot start with these flags",
        hint=config.bridge.if_not_served[1] if isinstance(error, BridgeError) else "change the flag in the message",
    )


def start_published(facts: ServerFacts) -> Finding:
    """The server had the weights of an earlier trainer."""
    left = "weights" if facts.adapter is None else "adapter"
    return Check("start").ok(
        f"the server had {left} of version {facts.policy_version} from an earlier trainer; the initial weights of "
        "training were published, as training does first"
    )


def skipped(*ids: str) -> list[Finding]:
    """Checks that are meaningless after alignment has failed."""
    return [Check(id).warn("not checked: meaningless until alignment is fixed") for id in ids]


def broken_off(error: GrpoError) -> Finding:
    """The server failed during the check."""
    return Check("broke off").fail(
        str(error),
        cause="the server failed or exited during the check, or gave an unexpected answer",
        hint="look at its log, restart it, and check again",
    )


def adapter_not_restored(why: str) -> Finding:
    """The adapter that was served before could not be restored."""
    return Check("adapter").warn(
        f"the adapter that was served before was not restored: {why}",
        hint="none needed for training, which publishes its own adapter first; else restart the server",
    )


def _is_same_model(left: str, right: str) -> bool:
    try:
        return left == right or resolve_model(left) == resolve_model(right)
    except ModelError:
        return False
