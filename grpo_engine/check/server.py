"""Whether what answers is a server that the trainer can work with, and what to do where it is none, or fails. Pure."""

from __future__ import annotations

from grpo_engine.check.canary import ADVICE
from grpo_engine.check.config import CheckConfig
from grpo_engine.check.findings import Finding, Line
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
        return Line("server").fail(
            seen,
            cause="it takes no adapters, which lora_only hands over, so the canary is not checked",
            advice="start it with --enable-lora",
        )
    if not _is_same_model(facts.model_name, config.model_name):
        return Line("server").warn(
            f"{seen}; serves {facts.model_name!r}",
            cause=f"another name than the trainer's {config.model_name!r}; alignment will tell whether it is the same",
            advice="start the server with the trainer's --model-name",
        )
    if config.bridge.trains_adapter and config.lora_dropout > 0:
        return Line("server").warn(
            seen,
            cause=f"--lora-dropout {config.lora_dropout:g} makes the trainer disagree with the sampler on every token",
            advice="train with --lora-dropout 0",
        )
    return Line("server").ok(seen)


def can_be_handed_weights(facts: ServerFacts, config: CheckConfig) -> bool:
    """Whether the bridge leads to this server, as far as the server says."""
    return facts.kind is ServerKind.OURS and (config.bridge.mode != "lora_only" or facts.takes_adapters)


def no_server(config: CheckConfig, error: GrpoError) -> Finding:
    """Nobody answers."""
    return Line("server").fail(
        str(error),
        cause="no inference server is up on this port, its model is still loading, or it is of a kind unknown here",
        advice=f"start it (grpo-engine server --model-name {config.model_name} --port {config.vllm_port}), wait until "
        "/health says 200, or name its port by --vllm-port",
    )


def other_trainer(pid: int) -> Finding:
    """Somebody trains on these weights right now."""
    return Line("trainer").fail(
        f"process {pid} lives, and was the last to write the weights that this server shares",
        cause="a training run is using this server; a check would change its weights below it",
        advice="check before training, or with a server of its own",
    )


def no_bridge(config: CheckConfig, facts: ServerFacts) -> Finding:
    """A stock server, to which no bridge leads."""
    return Line("bridge").fail(
        f"a {facts.kind.value} server cannot be handed new weights, so the canary is not checked",
        cause=f"it has no /bridge/pause and /bridge/reload with versions, which bridge {config.bridge.mode} asks for",
        advice=f"serve with grpo-engine server --model-name {config.model_name}; the other checks below still hold",
    )


def no_trainer(config: CheckConfig, error: GrpoError) -> Finding:
    """The bridge does not attach, or the flags do not fit."""
    return Line("trainer").fail(
        str(error),
        cause="the trainer cannot be set up, and training with these flags would end in the same way",
        advice=ADVICE[config.bridge.mode] if isinstance(error, BridgeError) else "change the flag that it names",
    )


def start_handed_over(facts: ServerFacts) -> Finding:
    """The server held what an earlier trainer left."""
    left = "weights" if facts.adapter is None else "adapter"
    return Line("start").ok(
        f"the server held {left} of version {facts.policy_version}, of an earlier trainer; it was handed what training "
        "starts from, as training does first"
    )


def unasked(*ids: str) -> list[Finding]:
    """What the failure of alignment makes senseless."""
    return [Line(id).warn("not checked: it means nothing before alignment is mended") for id in ids]


def broken_off(error: GrpoError) -> Finding:
    """The server failed on the way."""
    return Line("broke off").fail(
        str(error),
        cause="the server failed or ended in the middle of the check, or answers something else",
        advice="look at its log, restart it, and check again",
    )


def adapter_not_restored(why: str) -> Finding:
    """What was served before is not served again."""
    return Line("adapter").warn(
        f"what was served before could not be put back: {why}",
        advice="nothing, for training: it hands over an adapter of its own first; else restart the server",
    )


def _is_same_model(left: str, right: str) -> bool:
    try:
        return left == right or resolve_model(left) == resolve_model(right)
    except ModelError:
        return False
