"""What a model thinks of sampled tokens: their log-probabilities, from a batch's rows to the output layer.

For the policy in training and for a reference alike, so that what differs between them is the weights. B rows, T
positions, N trained tokens, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from grpo_engine.algo.logprobs import token_logprobs
from grpo_engine.data.batching import Batch
from grpo_engine.data.packing import pack_prompts
from grpo_engine.models.layers import logit_divisor, takes_any_mask

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class Scorer:
    """Scores batches with one model, whose parameters may change between two calls."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        # Adapters put a wrapper around the model; the model itself is what has a body and an output layer.
        self._causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._can_share_prompts = takes_any_mask(self._causal_lm)
        self._logit_divisor = logit_divisor(self._causal_lm)

    def logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (B, T) of the labels, 0 where not trained, with their graph.

        The output layer is applied to trained positions alone: prompts and padding cost no vocabulary.

        Args:
            batch: on the model's device.
        """
        hidden = self._hidden_states(batch)  # (N, H)
        head = self._causal_lm.get_output_embeddings()
        temperatures = batch.temperatures[:, None].expand_as(batch.mask)[batch.mask] * self._logit_divisor  # (N,)
        chosen, entropy = token_logprobs(
            hidden,
            head.weight,
            batch.labels[batch.mask],
            bias=getattr(head, "bias", None),
            temperature=temperatures,
            soft_cap=getattr(self._causal_lm.config, "final_logit_softcapping", None),
        )
        empty = chosen.new_zeros(batch.mask.shape)
        return empty.masked_scatter(batch.mask, chosen), empty.masked_scatter(batch.mask, entropy)

    def _hidden_states(self, batch: Batch) -> Tensor:
        """(N, H) states that predict the trained labels, in the order of `batch.mask`."""
        body = self._causal_lm.get_decoder()
        packed = pack_prompts(batch) if self._can_share_prompts else None
        if packed is None:
            output = body(input_ids=batch.inputs, attention_mask=batch.attention_mask, use_cache=False)
            return cast(Tensor, output.last_hidden_state[batch.mask])
        output = body(
            input_ids=packed.inputs,
            position_ids=packed.positions,
            attention_mask=packed.attention_mask,
            use_cache=False,
        )
        return cast(Tensor, output.last_hidden_state.flatten(0, 1)[packed.trained])
