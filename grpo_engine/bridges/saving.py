"""Write what is trained into a folder that transformers, PEFT and vLLM can load. Imports nothing heavy by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.errors import BridgeError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def save_model(model: PreTrainedModel | PeftModel, model_name: str, folder: Path) -> None:
    """Write a model (an adapter alone, where PEFT wraps it) with the tokenizer of `model_name`."""
    from grpo_engine.models.loading import load_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "get_base_model"):
        # Embeddings are never part of these adapters, and looking whether they are would ask the hub.
        model.save_pretrained(folder, save_embedding_layers=False)
    else:
        model.save_pretrained(folder)
    load_tokenizer(model_name).save_pretrained(folder)


@contextmanager
def saying_why_unwritten(folder: Path) -> Iterator[None]:
    """Within, a disk that refuses the weights on their way to inference is named with what to do.

    Raises:
        BridgeError: it refused.
    """
    from safetensors import SafetensorError

    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError | SafetensorError) and type(error) is not Exception:  # that is tokenizers'
            raise
        raise BridgeError(
            f"{folder}: the weights that inference is to read cannot be written there: {error}; make room, or choose "
            "another folder (--run-folder; --adapter-folder of lora_only, --handover-storage of lora_restart and none)"
        ) from error


def trainable_device(text: str) -> str:
    """The device that a setting names; `auto` is the GPU where there is one."""
    import torch

    if text != "auto":
        return text
    return "cuda" if torch.cuda.is_available() else "cpu"
