"""What a model thinks of sampled tokens: their log-probabilities, from a batch's rows to the output layer.

For the policy in training and for a reference alike, so that what differs between them is the weights. B rows, T
positions, N trained tokens, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional

from grpo_engine.algo.logprobs import token_logprobs
from grpo_engine.compilers import has_compiler
from grpo_engine.data.batching import Batch
from grpo_engine.data.packing import PackedRows, pack
from grpo_engine.models.attention import BLOCK_SIZE, may_look, use_training_attention
from grpo_engine.models.layers import caps_attention, takes_any_mask
from grpo_engine.models.output_layer import logits_form
from grpo_engine.models.places import is_split
from grpo_engine.models.sharded import as_forward, compute_device, free_gathered, is_sharded
from grpo_engine.models.split import PartOfVocabulary

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from grpo_engine.ranks.group import RankGroup

log = logging.getLogger(__name__)

LEAST_GAIN = {"cpu": 0.1, "cuda": 0.15}
"""Share of the positions that packing must save. Below it the kernel for plain rows makes up for them: on a GPU it is
about 1.5 times as quick a pair of positions."""
MAX_MASK_ELEMENTS = 2**26
"""R × L × L: 64 MB of dense mask on a CPU; beyond it a kernel that needs no mask is the better choice."""
WIDTH_STEPS = 16
"""Rows on a GPU are padded to one of so many widths between a power of two and the next: kernels are chosen, and
layers compiled, for a width, and each is used again. At most 1/16 of the positions are added."""


class Scorer:
    """Scores batches with one model, whose parameters may change between two calls."""

    def __init__(self, model: PreTrainedModel | PeftModel, ranks: RankGroup | None = None) -> None:
        """Look at the model's attention and output layer.

        Args:
            ranks: of a split model, which all of them score at the same time.

        Raises:
            ModelError: its logits are made in a way that is not known here.
        """
        # Adapters put a wrapper around the model; the model itself is what has a body and an output layer.
        self.causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._logits_form = logits_form(self.causal_lm)
        if caps_attention(self.causal_lm):
            self.causal_lm.set_attn_implementation("eager")  # no other that every GPU has caps the scores
        self.shares_prompts = takes_any_mask(self.causal_lm)
        """Whether completions of one prompt may go through the network in one row, so that they are best kept
        together."""
        if self.shares_prompts:
            use_training_attention(self.causal_lm)
        self._part: PartOfVocabulary | None = None
        if is_split(self.causal_lm):
            assert ranks is not None
            self._part = PartOfVocabulary(self.causal_lm.get_output_embeddings().weight, ranks)
        self.num_positions = 0
        """That have gone through the layers, padding and prompts once for each time."""
        self._device = compute_device(model)
        self._sharded_score: Callable[[Batch], tuple[Tensor, Tensor]] | None = None
        if is_sharded(self.causal_lm):
            free_gathered(self.causal_lm)
            self._sharded_score = as_forward(self.causal_lm, self._score)
        if self.shares_prompts and self._device.type != "cpu" and not has_compiler():
            log.warning("prompts go through the network once a completion: install gcc or clang for once a group")
            self.shares_prompts = False

    def logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (B, T) of the labels, 0 where not trained, with their graph.

        The output layer is applied to trained positions alone: prompts and padding cost no vocabulary.

        Args:
            batch: on the CPU, where it is laid out (elsewhere it is fetched); the results are on the model's device.
        """
        shape = batch.mask.shape
        chosen, entropy = (self._sharded_score or self._score)(batch.to("cpu"))
        return chosen.view(shape), entropy.view(shape)

    def _score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`logprobs`, flattened to (B T,)."""
        hidden = self._hidden_states(batch)  # (N, H)
        head = self.causal_lm.get_output_embeddings()
        temperatures = batch.temperatures[:, None].expand_as(batch.mask)[batch.mask] * self._logits_form.divisor  # (N,)
        chosen, entropy = token_logprobs(
            hidden,
            head.weight,
            batch.labels[batch.mask].to(self._device, non_blocking=True),
            bias=getattr(head, "bias", None),
            temperature=temperatures.to(self._device, non_blocking=True),
            soft_cap=self._logits_form.soft_cap,
            part=self._part,
        )
        # By number, not by mask: the gradient of a masked scatter counts the mask, and waits for the GPU.
        places = batch.mask.flatten().nonzero().squeeze(1).to(self._device, non_blocking=True)
        empty = chosen.new_zeros(batch.mask.numel())
        return empty.index_copy(0, places, chosen), empty.index_copy(0, places, entropy)

    def _hidden_states(self, batch: Batch) -> Tensor:
        """(N, H) states that predict the trained labels, in the order of `batch.mask`."""
        body, device = self.causal_lm.get_decoder(), self._device
        packed = self._packed(batch) if self.shares_prompts else None
        if packed is None:
            # Without a mask, since padding stands at the end of a row, where no trained position looks.
            added = (0, _padded_width(batch.inputs.shape[1], device) - batch.inputs.shape[1])
            inputs = functional.pad(batch.inputs, added).to(device, non_blocking=True)
            # Found on the CPU: a GPU would be waited for.
            trained = functional.pad(batch.mask, added).flatten().nonzero()[:, 0].to(device, non_blocking=True)
            self.num_positions += inputs.numel()
            states = body(input_ids=inputs, use_cache=False).last_hidden_state  # (B, T or more, H)
            return cast(Tensor, states.flatten(0, 1)[trained])
        packed = packed.to(device)
        self.num_positions += packed.size
        # A view of one dimension, as transformers makes them for plain rows: layers are compiled for it or for none.
        positions = packed.positions.flatten().clone().view_as(packed.positions)
        states = body(
            input_ids=packed.inputs, position_ids=positions, attention_mask=may_look(packed), use_cache=False
        ).last_hidden_state  # (R, L, H)
        return cast(Tensor, states.flatten(0, 1)[packed.trained])

    def _packed(self, batch: Batch) -> PackedRows | None:
        """The batch with shared prompts; None where plain rows are the better choice."""
        on_cpu = self._device.type == "cpu"
        worth_it = (1 - LEAST_GAIN["cpu" if on_cpu else "cuda"]) * batch.inputs.numel()
        packed = pack(batch, in_one_row=not on_cpu, most_positions=worth_it)
        if packed is None:
            return None
        if on_cpu:
            return packed if packed.size * packed.inputs.shape[1] <= MAX_MASK_ELEMENTS else None
        return packed.padded(_padded_width(packed.inputs.shape[1], self._device))


def _padded_width(width: int, device: torch.device) -> int:
    if device.type == "cpu":
        return width
    step: int = max(2 ** (width.bit_length() - 1) // WIDTH_STEPS, BLOCK_SIZE)
    return width + -width % step
