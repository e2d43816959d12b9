"""Changes one weight, publishes it as in training, and restores it; samples before, between and after."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from grpo_engine.bridges import Bridge
from grpo_engine.check.alignment import difference
from grpo_engine.check.canary import CanaryReading, judge_canary
from grpo_engine.check.sampling import CheckedServer, Sample
from grpo_engine.check.trainer import TrainerSide
from grpo_engine.diagnosis.evidence import NoiseBand
from grpo_engine.diagnosis.finding import Finding
from grpo_engine.wire.inference import LogprobsMode

_LEAST_MOVE = 0.1
"""Mean |Δ| in nats that the change must cause; several times the noise of bfloat16."""
_STRENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_MAX_CANDIDATES = 6
_ROOM = 8
"""Tokens that are sampled after known ones."""


def check_canary(
    bridge: Bridge,
    server: CheckedServer,
    trainer: TrainerSide,
    samples: Sequence[Sample],
    *,
    mode: LogprobsMode,
    band: NoiseBand,
) -> Finding:
    """Whether inference follows a changed weight, and its restoration, which always happens.

    Args:
        samples: completions at temperature 1.
        mode: the convention of the server's log-probabilities.
    """
    config = trainer.trainee.config
    fixed = _fixed(samples)
    # All of a completion but its last tokens: long enough for a prefix cache to keep, with room to go on.
    known = (*fixed[0].prompt, *fixed[0].tokens[:-1])[: config.seq_len - _ROOM]
    canary = _find_canary(trainer, fixed, at_least=max(_LEAST_MOVE, 5 * band.normal))
    version = server.policy_version() + 1
    # Publish the initial weights of training first: later results are compared with these.
    bridge.publish(version, _writer(trainer, canary, canary.original))
    before, trainer_before = _ask_fixed(server, fixed), trainer.score(fixed, temperature=1.0).logprobs
    repeated = _ask_fixed(server, fixed)
    sampled_before = trainer.read(_ask_known(server, known), mode)
    try:
        bridge.publish(version + 1, _writer(trainer, canary, canary.changed))
        asked_changed = _ask_known(server, known)
        changed, trainer_changed = _ask_fixed(server, fixed), trainer.score(fixed, temperature=1.0).logprobs
        sampled_changed = trainer.read(asked_changed, mode)
    finally:
        with _signals_ignored():
            bridge.publish(version + 2, _writer(trainer, canary, canary.original))
    asked_after = _ask_known(server, known)
    reading = CanaryReading(
        parameter=canary.name,
        server_before=before,
        server_repeated=repeated,
        server_changed=changed,
        server_after=_ask_fixed(server, fixed),
        trainer_before=trainer_before,
        trainer_changed=trainer_changed,
        sampled_before=sampled_before,
        sampled_changed=sampled_changed,
        sampled_old=trainer.read(asked_changed, mode).trainer,
        sampled_after=trainer.read(asked_after, mode),
        versions=(version + 1, version + 2),
        served=(asked_changed[0].policy_version or 0, asked_after[0].policy_version or 0),
    )
    finding = judge_canary(reading, if_not_served=config.bridge.if_not_served, band=band)
    if not torch.equal(canary.parameter.data, canary.original):
        text = f"{canary.name} was not restored bit for bit; {finding.text}"
        return replace(finding, severity="error", text=text)
    return finding


@dataclass(frozen=True, slots=True)
class _Canary:
    """A parameter, and other values for it that surely show."""

    name: str
    parameter: nn.Parameter
    original: Tensor
    """A copy, bit for bit."""
    changed: Tensor


def _find_canary(trainer: TrainerSide, samples: Sequence[Sample], *, at_least: float) -> _Canary:
    """A trained parameter and values for it that move the log-probabilities of these completions.

    Tried on copies: what inference may be reading is not touched. The strongest change found is returned where none
    reaches `at_least`.
    """
    with trainer.trainee.unmerged():
        return _strongest_change(trainer, samples, at_least)


def _strongest_change(trainer: TrainerSide, samples: Sequence[Sample], at_least: float) -> _Canary:
    before = trainer.score(samples, temperature=1.0).logprobs
    most, best = -1.0, None
    for name, parameter in _candidates(trainer.trainee.model):
        for strength in _STRENGTHS:
            changed = _changed(parameter.data, strength)
            with _holding(parameter, changed):
                moved = difference(trainer.score(samples, temperature=1.0).logprobs, before).abs_mean
            if moved > most:
                original = parameter.data.clone()
                most, best = moved, _Canary(_short(name), parameter, original, changed)
            if best is not None and most >= at_least:
                return best
    assert best is not None, "a trainee has parameters that it trains"
    return best


def _candidates(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trained parameters, those first that are small and act on every token: norms, then adapters, the last layer's
    first."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]

    def rank(name: str, parameter: nn.Parameter) -> int:
        if parameter.ndim == 1 and "norm" in name:
            return 0
        return 1 if "lora_B" in name else 2

    trained.reverse()
    return sorted(trained, key=lambda pair: rank(*pair))[:_MAX_CANDIDATES]


def _short(name: str) -> str:
    """The parameter name without PEFT's prefix and infix."""
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def _changed(values: Tensor, strength: float) -> Tensor:
    """Other values, of the same type, shape and place."""
    if values.ndim == 1 and values.abs().max() > 0:
        return values * (1 + strength)
    # A fixed seed, since the check must not draw from the generators that training uses.
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(values.shape, generator=generator).to(values)
    size = values.float().square().mean().sqrt().item() or 0.05  # an adapter's second factor is initially zero
    return values + strength * size * noise


@contextmanager
def _holding(parameter: nn.Parameter, values: Tensor) -> Iterator[None]:
    """Replace the parameter's memory within."""
    own = parameter.data
    parameter.data = values
    try:
        yield
    finally:
        parameter.data = own


def _writer(trainer: TrainerSide, canary: _Canary, values: Tensor) -> Callable[[], None]:
    """A writer for `Bridge.publish` of all trained parameters, with `values` for the canary."""

    def write() -> None:
        trainer.trainee.write_weights()
        canary.parameter.data.copy_(values)

    return write


def _fixed(samples: Sequence[Sample]) -> list[Sample]:
    """A few completions whose tokens stay the same throughout: the longest of different prompts.

    Those that ended at a length limit are shortened, so that the server has room for more tokens.
    """
    longest: dict[tuple[int, ...], Sample] = {}
    for sample in sorted(samples, key=lambda sample: -len(sample.tokens)):
        if sample.finish_reason == "length":
            kept = max(len(sample.tokens) - _ROOM, 1)
            sample = replace(sample, tokens=sample.tokens[:kept], logprobs=sample.logprobs[:kept])
        longest.setdefault(sample.prompt, sample)
    return list(longest.values())[:3]


def _ask_fixed(server: CheckedServer, samples: Sequence[Sample]) -> list[list[float]]:
    return [server.prompt_logprobs((*sample.prompt, *sample.tokens))[len(sample.prompt) - 1 :] for sample in samples]


def _ask_known(server: CheckedServer, prompt: tuple[int, ...]) -> list[Sample]:
    """Sample twice after the same tokens, so that the second request hits the prefix cache."""
    server.sample(prompt, n=1, max_tokens=1, temperature=1.0)
    return server.sample(prompt, n=4, max_tokens=_ROOM, temperature=1.0)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM within; the time limit of the server's answers bounds it."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
