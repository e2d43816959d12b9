"""How much of a GPU's peak training reaches: floating-point operations that the model needs, over time and peak.

Source: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), section 4.1 and appendix B: model FLOPs utilization (MFU). Work
that is repeated, as with gradient checkpointing, is not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from grpo_engine.models.layers import layer_of
from grpo_engine.models.places import is_split

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

PEAK_TFLOPS = {
    **{"GB200": 2500, "B200": 2250, "GH200": 989, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989},
    **{"H20": 148, "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "A6000": 155, "A40": 150, "A10": 125, "L4": 121},
    **{"RTX 6000 Ada": 364, "RTX 4090": 165, "RTX 3090": 71},
}
"""Of bfloat16 and float16 without sparsity, by a part of the card's name; the first that fits. NVIDIA's datasheets."""
FORWARD, BACKWARD = 2, 4
"""Operations for each number of a matrix and each position: of the backward pass half for the input's gradient, half
for the matrix's own."""


class ModelFlops:
    """Operations of a model's forward and backward passes."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        """Count its matrices: those of layers, adapters among them, and the output layer.

        Args:
            model: a decoder; what is not trained has `requires_grad` false.
        """
        causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        head, embedding = causal_lm.get_output_embeddings().weight, causal_lm.get_input_embeddings().weight
        text = causal_lm.config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0)  # a model without attention has none
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1)
        if is_split(causal_lm):  # this rank has some of the heads
            queries = next(each for name, each in causal_lm.named_parameters() if name.endswith("q_proj.weight"))
            heads = len(queries) // head_dim
        matrices = [
            (layer_of(name), each)
            for name, each in model.named_parameters()
            if each.ndim == 2 and each is not head and each is not embedding
        ]
        trained = [layer for layer, each in matrices if each.requires_grad and layer is not None]
        lowest = min(trained, default=text.num_hidden_layers)
        self._of_position: int = sum(
            each.numel() * (FORWARD + _backward(each, is_below=layer is not None and layer < lowest))
            for layer, each in matrices
        )
        self._of_label: int = head.numel() * (FORWARD + _backward(head, is_below=False))
        layers = text.num_hidden_layers, text.num_hidden_layers - lowest
        # Queries with keys and scores with values, each over half of the square; twice that in the backward pass.
        self._of_pair: int = 2 * heads * head_dim * (layers[0] + 2 * layers[1])

    def of(self, *, positions: int, labels: int, mean_length: float) -> float:
        """Operations of one step.

        Args:
            positions: that go through the layers.
            labels: tokens that the output layer scores.
            mean_length: positions of the row that a position is in, on average; it attends to half of them.
        """
        return self._of_position * positions + self._of_label * labels + self._of_pair * positions * mean_length


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations a second that a GPU can do in 16 bits; None for another type, a CPU, or a card that is not known."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * tflops for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def _backward(matrix: torch.Tensor, *, is_below: bool) -> int:
    """Operations of the backward pass for each number of a matrix; none below the lowest layer that is trained."""
    return 0 if is_below else BACKWARD if matrix.requires_grad else BACKWARD // 2
