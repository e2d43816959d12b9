"""Write what is trained into a folder that transformers, PEFT and vLLM can load. Imports nothing heavy by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_engine.errors import BridgeError

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

_FILE_SIZE = "1GB"
_WRITER = "safe_save_file"
"""By what name transformers (5.5 to 5.19) knows what writes a file."""


def save_model(model: PreTrainedModel | PeftModel, model_name: str, folder: Path) -> None:
    """Write a model (an adapter alone, where PEFT wraps it) with the tokenizer of `model_name`."""
    from grpo_engine.models.loading import load_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "get_base_model"):
        # Embeddings are never part of these adapters, and looking whether they are would ask the hub.
        model.save_pretrained(folder, save_embedding_layers=False)
    else:
        write_whole(model, folder)
    load_tokenizer(model_name).save_pretrained(folder)


def write_whole(model: PreTrainedModel, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write a model without its tokenizer, several files at a time.

    transformers writes one after the other, each from fresh main memory: of the 20 s after which a server had 8 B new
    weights, that took 16.

    Args:
        tensors: what of it; None: all.
    """
    from transformers import modeling_utils

    from grpo_engine.models.tensor_files import WRITERS, can_write, write_tensors

    write = getattr(modeling_utils, _WRITER, None)
    if write is None:
        model.save_pretrained(folder, state_dict=tensors)
        return
    with ThreadPoolExecutor(WRITERS) as pool:
        writings = []

        def write_soon(content: dict[str, Tensor], *arguments: Any, **options: Any) -> None:
            is_plain = all(map(can_write, content.values()))
            writings.append(pool.submit(write_tensors if is_plain else write, content, *arguments, **options))

        setattr(modeling_utils, _WRITER, write_soon)
        try:
            model.save_pretrained(folder, state_dict=tensors, max_shard_size=_FILE_SIZE)
        finally:
            setattr(modeling_utils, _WRITER, write)
        for writing in writings:
            writing.result()


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
