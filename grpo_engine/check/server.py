"""Whether what answers is a server that the trainer can work with, and what to do where it is none. Pure."""

from __future__ import annotations

from grpo_engine.check.canary import ADVICE
from grpo_engine.check.config import CheckConfig
from grpo_engine.check.findings import Finding, fail, ok, warn
from grpo_engine.check.sampling import ServerFacts, ServerKind
from grpo_engine.errors import BridgeError, GrpoError, ModelError
from grpo_engine.models.loading import resolve_model


def judge_server(facts: ServerFacts, config: CheckConfig) -> Finding:
    """What answers, and whether it says that it is what the trainer needs."""
    version = "" if facts.policy_version is None else f", policy version {facts.policy_version}"
    place = "" if facts.device is None else f" on {facts.device} in {facts.dtype}"
    whose = "our server" if facts.kind is ServerKind.OURS else facts.kind.value
    seen = f"{whose}, {facts.engine}{place}{version}; log-probs {facts.logprobs_mode}" + (
        "" if facts.declares_mode else " (it does not say; that is its default)"
    )
    if facts.kind is ServerKind.OURS and not can_be_handed_weights(facts, config):
        return fail(
            "server",
            seen,
            cause="it takes no adapters, which lora_only hands over, so the canary is not checked",
            advice="start it with --enable-lora",
        )
    if not _is_same_model(facts.model_name, config.model_name):
        return warn(
            "server",
            f"{seen}; serves {facts.model_name!r}",
            cause=f"another name than the trainer's {config.model_name!r}; alignment will tell whether it is the same",
            advice="start the server with the trainer's --model-name",
        )
    if config.bridge.mode == "lora_only" and config.lora_dropout > 0:
        return warn(
            "server",
            seen,
            cause=f"--lora-dropout {config.lora_dropout:g} makes the trainer disagree with the sampler on every token",
            advice="train with --lora-dropout 0",
        )
    return ok("server", seen)


def can_be_handed_weights(facts: ServerFacts, config: CheckConfig) -> bool:
    """Whether the bridge leads to this server, as far as the server says."""
    return facts.kind is ServerKind.OURS and (config.bridge.mode != "lora_only" or facts.takes_adapters)


def no_server(config: CheckConfig, error: GrpoError) -> Finding:
    """Nobody answers."""
    return fail(
        "server",
        str(error),
        cause="no inference server is up on this port, its model is still loading, or it is of a kind unknown here",
        advice=f"start it (grpo-engine server --model-name {config.model_name} --port {config.vllm_port}), wait until "
        "/health says 200, or name its port by --vllm-port",
    )


def other_trainer(pid: int) -> Finding:
    """Somebody trains on these weights right now."""
    return fail(
        "trainer",
        f"process {pid} lives, and was the last to write the weights that this server shares",
        cause="a training run is using this server; a check would change its weights below it",
        advice="check before training, or with a server of its own",
    )


def no_bridge(config: CheckConfig, facts: ServerFacts) -> Finding:
    """A stock server, to which no bridge leads."""
    return fail(
        "bridge",
        f"a {facts.kind.value} server cannot be handed new weights, so the canary is not checked",
        cause=f"it has no /bridge/pause and /bridge/reload with versions, which bridge {config.bridge.mode} asks for",
        advice=f"serve with grpo-engine server --model-name {config.model_name}; the other checks below still hold",
    )


def no_trainer(config: CheckConfig, error: GrpoError) -> Finding:
    """The bridge does not attach, or the flags do not fit."""
    return fail(
        "trainer",
        str(error),
        cause="the trainer cannot be set up, and training with these flags would end in the same way",
        advice=ADVICE[config.bridge.mode] if isinstance(error, BridgeError) else "change the flag that it names",
    )


def _is_same_model(left: str, right: str) -> bool:
    try:
        return left == right or resolve_model(left) == resolve_model(right)
    except ModelError:
        return False
