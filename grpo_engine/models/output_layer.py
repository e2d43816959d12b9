"""How a model turns its output layer's products into logits: scaled or soft-capped, which our head must reproduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_engine.errors import ModelError
from grpo_engine.models.places import whole_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_ERROR = 0.02
"""Relative to the largest logit: bf16 rounds by 0.4 %, several times."""


class LogitsForm(NamedTuple):
    """Logits are `cap(products) / divisor`."""

    divisor: float
    """Granite's `logits_scaling`, 1 / Cohere's `logit_scale`, 1 / Falcon-H1's `lm_head_multiplier`."""
    soft_cap: float | None
    """c of c tanh(x / c), as in Gemma 2."""

    def logits(self, products: Tensor) -> Tensor:
        """The model's logits for these products."""
        capped = products if self.soft_cap is None else self.soft_cap * (products / self.soft_cap).tanh()
        return capped / self.divisor


def logits_form(model: PreTrainedModel) -> LogitsForm:
    """How the model's logits are computed from its decoder's states, verified on a few tokens.

    Raises:
        ModelError: in an unknown way, so that log-probs would be wrong.
    """
    config = model.config.get_text_config()

    def setting(*names: str) -> Any:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    scale = (setting("logit_scale") or 1.0) * (setting("lm_head_multiplier") or 1.0)
    form = LogitsForm(
        divisor=float((setting("logits_scaling") or 1.0) / scale),
        soft_cap=setting("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
    )
    products, logits = _of_some_tokens(model)
    if products is not None:
        error = (form.logits(products) - logits).abs().max()
        if not error > LARGEST_ERROR * logits.abs().max():  # so NaN passes; the first step reports it
            return form
    raise ModelError(
        f"{type(model).__name__} computes its logits from its output layer in an unknown way, so log-probs would be "
        "wrong: train "
        "another model"
    )


@torch.no_grad()
def _of_some_tokens(model: PreTrainedModel) -> tuple[Tensor | None, Tensor]:
    """The output layer's products with the decoder's states (None if it returns none), and the logits; fp32.

    Of a split model both are of this rank's words.
    """
    seen: list[Tensor | None] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.append(getattr(output, "last_hidden_state", None))

    head = model.get_output_embeddings()
    tokens = torch.arange(min(8, whole_shape(head.weight)[0]), device=head.weight.device)[None]
    hook = model.get_decoder().register_forward_hook(look)
    try:
        logits = model(input_ids=tokens, use_cache=False).logits.float()
    finally:
        hook.remove()
    states = seen[0] if seen else None
    return (None if states is None else head(states).float()), logits
