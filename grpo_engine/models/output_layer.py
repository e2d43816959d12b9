"""What a model makes of its output layer's products: scaled or capped logits, as a head of ours must make them too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_engine.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_ERROR = 0.02
"""Of the largest logit: bf16 rounds to 0.004 of each number, several times."""


class LogitsForm(NamedTuple):
    """Logits are `cap(products) / divisor`."""

    divisor: float
    """Granite's `logits_scaling`, 1 / Cohere's `logit_scale`, 1 / Falcon-H1's `lm_head_multiplier`."""
    soft_cap: float | None
    """c of c tanh(x / c), as in Gemma 2."""

    def logits(self, products: Tensor) -> Tensor:
        """What the model would make of these."""
        capped = products if self.soft_cap is None else self.soft_cap * (products / self.soft_cap).tanh()
        return capped / self.divisor


def logits_form(model: PreTrainedModel) -> LogitsForm:
    """How the model's logits come from its decoder's states, compared once with what it says of a few tokens.

    Raises:
        ModelError: in another way than those known here, so that its log-probabilities would be wrong.
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
        if not error > LARGEST_ERROR * logits.abs().max():  # so NaN passes, which the first step will speak of
            return form
    raise ModelError(
        f"{type(model).__name__} makes its logits from its output layer in a way that is not known here, and its "
        "log-probabilities would be wrong: train another model"
    )


@torch.no_grad()
def _of_some_tokens(model: PreTrainedModel) -> tuple[Tensor | None, Tensor]:
    """The output layer's products with the decoder's states (None where it shows none), and the logits; fp32."""
    seen: list[Tensor | None] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.append(getattr(output, "last_hidden_state", None))

    head = model.get_output_embeddings()
    tokens = torch.arange(min(8, len(head.weight)), device=head.weight.device)[None]
    hook = model.get_decoder().register_forward_hook(look)
    try:
        logits = model(input_ids=tokens, use_cache=False).logits.float()
    finally:
        hook.remove()
    states = seen[0] if seen else None
    return (None if states is None else head(states).float()), logits
