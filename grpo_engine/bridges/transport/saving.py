"""Writes models and adapters as folders that transformers, PEFT and vLLM can load. Torch-free to import."""

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
"""Name of the function in transformers (5.5 to 5.19) that writes one file."""


def save_model(
    model: PreTrainedModel | PeftModel, model_name: str, folder: Path, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model (only the adapter if PEFT wraps it) with the tokenizer of `model_name`.

    Args:
        tensors: of a model that has no values itself; None: the model's own.
    """
    from grpo_engine.models.loading import load_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "get_base_model"):
        # Adapters never have embeddings here, and PEFT's check for them would send a request to the hub.
        model.save_pretrained(folder, save_embedding_layers=False)
    else:
        write_whole(model, folder, tensors)
    load_tokenizer(model_name).save_pretrained(folder)


def write_whole(model: PreTrainedModel, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write a model without its tokenizer, several files at a time.

    transformers writes one after the other, each through newly allocated memory: 16 of the 20 s that an update of an
    8B model took.

    Args:
        tensors: the tensors to write; None: all.
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
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Within, errors of the disk become a message with the folder and what to do.

    Raises:
        BridgeError: weights cannot be written.
    """
    from safetensors import SafetensorError

    try:
        yield
    except Exception as error:
        if (
            not isinstance(error, OSError | SafetensorError) and type(error) is not Exception
        ):  # tokenizers raises a bare Exception
            raise
        raise BridgeError(
            f"{folder}: weights for the inference server cannot be written: {error}; make room, or choose another "
            "folder (--run-folder; --adapter-folder of lora_only, --handover-storage of lora_restart and none)"
        ) from error
