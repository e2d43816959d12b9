"""The trainer's side of a check: scores sampled tokens with the code that trains."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from grpo_engine.check.alignment import Alternative, Reading, Scored, Values
from grpo_engine.check.sampling import Sample
from grpo_engine.data.batching import make_batch, micro_batches
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.inference import LogprobsMode
from grpo_engine.wire.rollouts import MASKED_LABEL, MASKED_LOGPROB, ScoredGroup

_TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5)
"""Temperatures that a server may have used instead."""
_TOP_PS, _TOP_KS = (0.8, 0.9, 0.95), (20, 40, 50)
"""Defaults of generation_config.json files and servers."""


class TrainerSide:
    """A trainee that only scores."""

    def __init__(self, trainee: Trainee) -> None:
        self.trainee = trainee

    @property
    def dtype(self) -> str:
        """Type of the parameters."""
        return str(next(self.trainee.model.parameters()).dtype).removeprefix("torch.")

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], *, temperature: float, mode: LogprobsMode = "processed") -> Scored:
        """Log-probabilities and entropies of the completions' tokens, laid out as a training batch is."""
        batch = make_batch(_as_groups(samples, temperature, mode), seq_len=self.trainee.config.seq_len)
        logprobs, entropies = torch.zeros_like(batch.rollout_logprobs), torch.zeros_like(batch.rollout_logprobs)
        for micro_batch in micro_batches(batch, self.trainee.config.batch_size):
            rows = micro_batch.batch.to(self.trainee.device)
            width = rows.mask.shape[1]
            for whole, part in zip((logprobs, entropies), self.trainee.logprobs(rows), strict=True):
                whole[micro_batch.row_numbers, :width] = part.to(whole)
        return Scored(
            logprobs=[row[mask].tolist() for row, mask in zip(logprobs, batch.mask, strict=True)],
            entropies=[row[mask].tolist() for row, mask in zip(entropies, batch.mask, strict=True)],
        )

    def read(self, samples: Sequence[Sample], mode: LogprobsMode) -> Reading:
        """Log-probabilities of both sides for completions at temperature 1."""
        return reading_of(samples, self.score(samples, temperature=1.0, mode=mode))

    def alternatives(self, samples: Sequence[Sample], *, temperature: float) -> list[Alternative]:
        """Log-probabilities at other temperatures, with truncation, or without the adapter."""
        found = [
            Alternative(
                key=f"temperature:{other:g}",
                label=f"if logits are divided by {other:g}",
                cause=f"the server's log-probs are of temperature {other:g}, though {temperature:g} was asked for",
                hint="ask the server itself and no proxy, and look at its default sampling settings",
                trainer=self.score(samples, temperature=other).logprobs,
            )
            for other in _TEMPERATURES
            if other != temperature
        ]
        limits = [(top_p, 0) for top_p in _TOP_PS] + [(1.0, top_k) for top_k in _TOP_KS]
        for top_p, top_k in limits:
            name, value = ("top_k", top_k) if top_k else ("top_p", top_p)
            found.append(
                Alternative(
                    key=f"{name}:{value:g}",
                    label=f"if what {name} {value:g} leaves is taken for the whole",
                    cause=f"the server samples with {name} {value:g} and reports log-probs of what that leaves",
                    hint=f"sample without {name}; start a stock vLLM with --generation-config vllm",
                    trainer=self._truncated(samples, temperature=temperature, top_p=top_p, top_k=top_k),
                )
            )
        model = self.trainee.model
        if hasattr(model, "disable_adapter"):
            with model.disable_adapter():
                bare = self.score(samples, temperature=temperature).logprobs
            found.insert(
                0,
                Alternative(
                    key="base model",
                    label="by the base model without its adapter",
                    cause="the server answers with the base model: it does not use the published adapter",
                    hint="look at /lora/status of the server, and start it with --enable-lora and a --max-lora-rank "
                    "of at least --lora-r",
                    trainer=bare,
                ),
            )
        return found

    @torch.no_grad()
    def _truncated(self, samples: Sequence[Sample], *, temperature: float, top_p: float, top_k: int) -> Values:
        """Log-probabilities after truncation and renormalisation; tokens that would be cut off keep their own."""
        values: list[list[float]] = []
        for sample in samples:
            tokens = torch.tensor([*sample.prompt, *sample.tokens], device=self.trainee.device)
            logits = self.trainee.model(input_ids=tokens[None]).logits[0, len(sample.prompt) - 1 : -1].float()
            logprobs = torch.log_softmax(logits / temperature, dim=-1)  # (N, V)
            chosen = logprobs.gather(-1, tokens[len(sample.prompt) :, None])[:, 0]
            kept = _kept_logprob(logprobs, top_p=top_p, top_k=top_k)
            values.append((chosen - kept).clamp(max=0.0).tolist())
        return values


def reading_of(samples: Sequence[Sample], scored: Scored) -> Reading:
    """Completions, grouped by their prompts."""
    numbers: dict[tuple[int, ...], int] = {}
    groups = [numbers.setdefault(sample.prompt, len(numbers)) for sample in samples]
    return Reading(server=[sample.logprobs for sample in samples], trainer=scored.logprobs, groups=groups)


def _as_groups(samples: Sequence[Sample], temperature: float, mode: LogprobsMode) -> list[ScoredGroup]:
    """Groups as an environment posts them."""
    groups: list[ScoredGroup] = []
    for prompt, members in groupby(samples, key=lambda sample: sample.prompt):
        completions = [list(sample.tokens) for sample in members]
        groups.append(
            ScoredGroup(
                tokens=[[*prompt, *tokens] for tokens in completions],
                masks=[[*[MASKED_LABEL] * len(prompt), *tokens] for tokens in completions],
                scores=[0.0] * len(completions),
                inference_logprobs=[[*[MASKED_LOGPROB] * len(prompt), *[0.0] * len(tokens)] for tokens in completions],
                generation_params={"temperature": temperature, "logprobs_mode": mode},
            )
        )
    return groups


def _kept_logprob(logprobs: Tensor, *, top_p: float, top_k: int) -> Tensor:
    """(N,) logarithm of the probability that truncation leaves, of (N, V)."""
    ordered = logprobs.sort(dim=-1, descending=True).values
    if top_k:
        return ordered[:, :top_k].logsumexp(dim=-1)
    probabilities = ordered.exp()
    is_kept = probabilities.cumsum(dim=-1) - probabilities < top_p
    return ordered.masked_fill(~is_kept, -torch.inf).logsumexp(dim=-1)
