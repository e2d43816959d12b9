"""Checks a group as it was posted and reads it into rows that can be trained on.

S sequences of their own lengths, F tokens of all of them, one after another. On the wire, untrained
tokens have a label and a log-probability that no token can have; here they become a mask. Groups come from other
programs, so everything is checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, get_args

import torch
from torch import Tensor

from grpo_engine.errors import DataError
from grpo_engine.wire.inference import LEAST_TEMPERATURE, MAX_TEMPERATURE, LogprobsMode
from grpo_engine.wire.rollouts import MASKED_LABEL, MASKED_LOGPROB, ScoredGroup

LOGPROB_ROUNDING = 1e-6
"""A log-probability may be above 0 by this much: servers subtract a log-sum that was rounded."""

MOST_REWARD = 1e9
"""Far beyond it differences and squares of rewards overflow in float32, and the loss would not be finite."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRows:
    """A checked group. Tensors are on the CPU."""

    lengths: Tensor
    """(S,) int64: tokens of each sequence."""
    tokens: Tensor
    """(F,) int64."""
    is_trained: Tensor
    """(F,) bool; never a sequence's first token, which nothing predicts."""
    rollout_logprobs: Tensor
    """(F,) fp32, 0 where not trained."""
    rewards: Tensor
    """(S,) fp32."""
    temperatures: Tensor
    """(S,) fp32: what the trainer divides logits by."""
    is_zeroed: Tensor
    """(S,) bool: the environment excludes it from the gradient."""
    is_truncated: Tensor
    """(S,) bool: the completion ended at its length limit; False where the environment does not say."""
    advantages: Tensor | None
    """(F,) fp32 where the environment gives its own."""
    ref_logprobs: Tensor | None
    """(F,) fp32."""
    policy_versions: Tensor | None
    """(F,) int64."""
    env_id: int | None


def sender_words(env_id: int | None, environment_names: Mapping[int, str]) -> str:
    """The sender of a group, for messages: name and id, or the id alone, since a stock rollout API sends no names."""
    if env_id is None:
        return "an unnamed environment"
    name = environment_names.get(env_id)
    return f"the environment with env_id {env_id}" if name is None else f"environment {name!r} (env_id {env_id})"


def check_group(group: ScoredGroup, *, environment_names: Mapping[int, str] | None = None) -> None:
    """Check that a group can be trained on.

    Args:
        group: as it was posted.
        environment_names: env_id to name, for the message.

    Raises:
        DataError: the environment, the sequence and the position, what is wrong there, and what to do.
    """
    read_group(group, environment_names=environment_names)


def read_group(
    group: ScoredGroup,
    *,
    environment_names: Mapping[int, str] | None = None,
    default_logprobs_mode: LogprobsMode = "raw",
) -> GroupRows:
    """Check a group and read it; `default_logprobs_mode` holds where the group does not say (stock servers: raw).

    Raises:
        DataError: as `check_group`.
    """
    where = f"group of {sender_words(group.env_id, environment_names or {})}"
    num_sequences = len(group.tokens)
    if num_sequences == 0:
        raise DataError(f"{where}: the group has no sequences: post at least one, or nothing")
    if not group.inference_logprobs or not any(group.inference_logprobs):
        raise DataError(
            f"{where}: no inference_logprobs. GRPO requires inference_logprobs for importance sampling! Start the "
            "environment with `--openai.server_type vllm`, and have it pass on the log-probabilities it gets"
        )
    _refuse_unsupported(group, where)
    for name in ("masks", "scores", "inference_logprobs"):
        _check_count(getattr(group, name), num_sequences, name, where)
    lengths = _checked_lengths(group, where)
    ragged = _Ragged(lengths, where)

    tokens = ragged.integers(group.tokens, "tokens")
    labels = ragged.integers(group.masks, "masks")
    ragged.refuse(tokens < 0, tokens, "tokens", "is not a token id: post the tokenizer's ids")
    is_trained = labels != MASKED_LABEL
    ragged.refuse(
        is_trained & (labels != tokens),
        labels,
        "masks",
        f"is neither {MASKED_LABEL} nor the token there: masks hold labels, the token itself where it is trained",
    )
    first = torch.zeros_like(is_trained).index_fill(0, ragged.starts, True)
    ragged.refuse(is_trained & first, labels, "masks", f"trains a token that nothing precedes: label it {MASKED_LABEL}")
    num_trained = torch.zeros_like(lengths).index_add(0, ragged.sequence, is_trained.long())
    if not num_trained.all():
        sequence = int((num_trained == 0).nonzero()[0])
        raise DataError(
            f"{where}: sequence {sequence}: every label is {MASKED_LABEL}, so nothing is trained: "
            "label the completion's tokens with themselves"
        )
    policy_versions = ragged.optional_integers(group.policy_versions, "policy_versions")
    return GroupRows(
        lengths=lengths,
        tokens=tokens,
        is_trained=is_trained,
        rollout_logprobs=_rollout_logprobs(group, ragged, is_trained),
        rewards=_rewards(group, where),
        temperatures=torch.tensor(_temperatures(group, default_logprobs_mode, where), dtype=torch.float32),
        is_zeroed=torch.tensor([bool(o.get("set_advantage_to_zero")) for o in _overrides(group, where)]),
        is_truncated=_is_truncated(group, where),
        advantages=_advantages(group, ragged, is_trained),
        ref_logprobs=ragged.optional_floats(group.ref_logprobs, is_trained, "ref_logprobs"),
        policy_versions=policy_versions,
        env_id=group.env_id,
    )


class _Ragged:
    """Reads lists of S sequences into flat tensors, and locates faults in them."""

    def __init__(self, lengths: Tensor, where: str) -> None:
        self.lengths, self.where = lengths, where
        self.starts = lengths.cumsum(0) - lengths  # (S,)
        self.sequence = torch.arange(len(lengths)).repeat_interleave(lengths)  # (F,)

    def integers(self, rows: Sequence[Sequence[int]], name: str) -> Tensor:
        """(F,) int64."""
        flat = self._flat(rows, None, name)
        if flat.dtype is not torch.int64:
            raise DataError(
                f"{self.where}: {name} holds {str(flat.dtype).removeprefix('torch.')} values: post integers"
            )
        return flat

    def floats(self, rows: Sequence[Sequence[float]], is_trained: Tensor, name: str) -> Tensor:
        """(F,) fp32, finite, 0 where not trained."""
        flat = self._flat(rows, torch.float32, name)
        self.refuse(is_trained & ~flat.isfinite(), flat, name, "is not finite, and its token is trained")
        return torch.where(is_trained, flat, 0.0)

    def optional_integers(self, rows: list[list[int]] | None, name: str) -> Tensor | None:
        """As `integers`; None and the empty list, which stock environments send, both mean absent."""
        if not rows:
            return None
        self._check_shape(rows, name)
        return self.integers(rows, name)

    def optional_floats(self, rows: list[list[float]] | None, is_trained: Tensor, name: str) -> Tensor | None:
        """As `floats`, or None."""
        if not rows:
            return None
        self._check_shape(rows, name)
        return self.floats(rows, is_trained, name)

    def refuse(self, is_bad: Tensor, flat: Tensor, name: str, what: str) -> None:
        """Raise for the first bad value, with its place."""
        if is_bad.any():
            index = int(is_bad.nonzero()[0])
            sequence = int(self.sequence[index])
            place = f"sequence {sequence}: {name}[{index - int(self.starts[sequence])}]"
            raise DataError(f"{self.where}: {place} = {flat[index].item():.6g} {what}")

    def _check_shape(self, rows: Sequence[Sequence[float]], name: str) -> None:
        _check_count(rows, len(self.lengths), name, self.where)
        for sequence, (row, length) in enumerate(zip(rows, self.lengths.tolist(), strict=True)):
            _check_length(row, length, sequence, name, self.where)

    def _flat(self, rows: Sequence[Sequence[float]], dtype: torch.dtype | None, name: str) -> Tensor:
        try:
            flat = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            flat = torch.empty(0, 0)
        if flat.ndim != 1:
            raise DataError(f"{self.where}: {name} has entries that are not numbers: post one flat list per sequence")
        return flat


def _refuse_unsupported(group: ScoredGroup, where: str) -> None:
    """Refuse fields that would change the training and are not implemented."""
    if group.distill_token_ids or group.distill_logprobs:
        raise DataError(f"{where}: has distillation targets, which the trainer does not support: disable them there")
    if isinstance(group.images, list | dict) and any(group.images):
        raise DataError(f"{where}: has images, which the trainer does not support: use a text environment")


def _check_count(rows: Any, num_sequences: int, name: str, where: str) -> None:
    if not isinstance(rows, list) or len(rows) != num_sequences:
        found = f"{len(rows)} entries" if isinstance(rows, list) else f"a {type(rows).__name__}"
        raise DataError(f"{where}: {name} has {found}, tokens has {num_sequences} sequences: post one for each")


def _check_length(row: Any, length: int, sequence: int, name: str, where: str) -> None:
    if not isinstance(row, list) or len(row) != length:
        found = f"{len(row)} entries" if isinstance(row, list) else f"a {type(row).__name__}"
        raise DataError(
            f"{where}: sequence {sequence}: {name} has {found}, tokens has {length}: post one for each token, "
            f"{MASKED_LABEL} in masks and {MASKED_LOGPROB} in inference_logprobs where it is not trained"
        )


def _checked_lengths(group: ScoredGroup, where: str) -> Tensor:
    """(S,) tokens of each sequence."""
    assert group.inference_logprobs is not None
    lengths: list[int] = []
    for sequence, row in enumerate(group.tokens):
        if not isinstance(row, list) or len(row) < 2:
            found = f"{len(row)} tokens" if isinstance(row, list) else f"a {type(row).__name__} of tokens"
            raise DataError(
                f"{where}: sequence {sequence} has {found}: post a prompt and a completion, at least 2 tokens"
            )
        _check_length(group.masks[sequence], len(row), sequence, "masks", where)
        _check_length(group.inference_logprobs[sequence], len(row), sequence, "inference_logprobs", where)
        lengths.append(len(row))
    return torch.tensor(lengths)


def _rollout_logprobs(group: ScoredGroup, ragged: _Ragged, is_trained: Tensor) -> Tensor:
    assert group.inference_logprobs is not None
    logprobs = ragged.floats(group.inference_logprobs, is_trained, "inference_logprobs")
    ragged.refuse(
        logprobs > LOGPROB_ROUNDING,
        logprobs,
        "inference_logprobs",
        f"is above 0 at a trained token, so it is not a log-probability ({MASKED_LOGPROB} marks tokens without one): "
        "align masks with what the server sampled, and get log-probabilities by `--openai.server_type vllm`",
    )
    return logprobs


def _advantages(group: ScoredGroup, ragged: _Ragged, is_trained: Tensor) -> Tensor | None:
    advantages = ragged.optional_floats(group.advantages, is_trained, "advantages")
    if advantages is not None:
        ragged.refuse(advantages.abs() > MOST_REWARD, advantages, "advantages", f"is beyond ±{MOST_REWARD:g}")
    return advantages


def _rewards(group: ScoredGroup, where: str) -> Tensor:
    for sequence, score in enumerate(group.scores):
        is_number = isinstance(score, int | float) and not isinstance(score, bool)
        if not is_number or not -MOST_REWARD <= score <= MOST_REWARD:
            is_large = is_number and abs(score) < math.inf
            what = f"beyond ±{MOST_REWARD:g}" if is_large else "not a finite number"
            raise DataError(f"{where}: sequence {sequence}: scores = {score!r:.40} is {what}: fix the reward")
    return torch.tensor(group.scores, dtype=torch.float32)


def _is_truncated(group: ScoredGroup, where: str) -> Tensor:
    if not group.truncated:
        return torch.zeros(len(group.tokens), dtype=torch.bool)
    _check_count(group.truncated, len(group.tokens), "truncated", where)
    return torch.tensor(group.truncated, dtype=torch.bool)


def _overrides(group: ScoredGroup, where: str) -> list[dict[str, Any]]:
    if not group.overrides:
        return [{}] * len(group.tokens)
    _check_count(group.overrides, len(group.tokens), "overrides", where)
    return [override or {} for override in group.overrides]


def _temperatures(group: ScoredGroup, default_mode: LogprobsMode, where: str) -> list[float]:
    """(S,) what logits are divided by, so that the trainer's log-probabilities mean what the server's do.

    `processed` log-probabilities are of the tempered distribution, `raw` ones of the model's own: temperature 1.
    """
    parameters, group_overrides = group.generation_params or {}, group.group_overrides or {}
    mode = parameters.get("logprobs_mode", default_mode)
    if mode not in get_args(LogprobsMode):
        raise DataError(
            f"{where}: generation_params.logprobs_mode = {mode!r:.40}: say one of {', '.join(get_args(LogprobsMode))}"
        )
    if mode == "raw":
        return [1.0] * len(group.tokens)
    for name, neutral in (("top_p", (1,)), ("top_k", (-1, 0))):
        if parameters.get(name, neutral[0]) not in neutral:
            raise DataError(
                f"{where}: generation_params.{name} = {parameters[name]!r} with processed log-probabilities, which are "
                f"then of a truncated vocabulary that the trainer does not know: sample with {name} = {neutral[0]}"
            )
    temperatures = []
    for sequence, override in enumerate(_overrides(group, where)):
        levels = (override, parameters, group_overrides)
        temperature = next((level["temperature"] for level in levels if level.get("temperature") is not None), 1.0)
        is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not is_number or not LEAST_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            raise DataError(
                f"{where}: sequence {sequence}: temperature = {temperature!r:.40} with processed log-probabilities: "
                f"sample at {LEAST_TEMPERATURE:g} to {MAX_TEMPERATURE:g}; greedy sampling has no distribution to learn "
                "from"
            )
        temperatures.append(float(temperature))
    return temperatures
