"""Writes models and adapters as folders that transformers, PEFT and vLLM can load. Torch-free to import."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_engine.errors import BridgeError

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

Write = Callable[..., None]
"""Writes one file."""

_FILE_SIZE = "1GB"
_WRITER = "safe_save_file"
"""Name of the function in transformers (5.5 to 5.19) that writes one file."""


def own_tensors(model: PreTrainedModel | PeftModel) -> dict[str, Tensor]:
    """What `save_model` writes of a model: all values, or only those of the adapter if PEFT wraps it; not copied."""
    if not hasattr(model, "get_base_model"):
        return dict(model.state_dict())
    return {name: parameter.detach() for name, parameter in model.named_parameters() if ".lora_" in name}


def save_model(
    model: PreTrainedModel | PeftModel, model_name: str, folder: Path, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model (only the adapter if PEFT wraps it) with the tokenizer of `model_name`; in any thread.

    Args:
        tensors: the values to write, by the names of `own_tensors`; None: the model's own.
    """
    from grpo_engine.models.loading import load_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "get_base_model"):
        # Adapters never have embeddings here, and PEFT's check for them would send a request to the hub.
        model.save_pretrained(
            folder, save_embedding_layers=False, state_dict=None if tensors is None else dict(tensors)
        )
    else:
        write_whole(model, folder, tensors)
    load_tokenizer(model_name).save_pretrained(folder)


def write_whole(model: PreTrainedModel, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write a model without its tokenizer, several files at a time; in any thread.

    transformers writes one after the other, each through newly allocated memory: 16 of the 20 s that an update of an
    8B model took.

    Args:
        tensors: the tensors to write; None: all.
    """
    from grpo_engine.models.tensor_files import WRITERS, can_write, write_tensors

    content = None if tensors is None else dict(tensors)  # transformers removes those that it has written
    with ThreadPoolExecutor(WRITERS) as pool:
        writings = []

        def write_soon(write: Write, content: dict[str, Tensor], *arguments: Any, **options: Any) -> None:
            is_plain = all(map(can_write, content.values()))
            writings.append(pool.submit(write_tensors if is_plain else write, content, *arguments, **options))

        with _files_written_by(write_soon) as is_replaced:
            model.save_pretrained(folder, state_dict=content, **({"max_shard_size": _FILE_SIZE} if is_replaced else {}))
        for writing in writings:
            writing.result()


@contextmanager
def writing_in_parts(model: PreTrainedModel, folder: Path) -> Iterator[Callable[[dict[str, Tensor]], None] | None]:
    """Within, a model is written without its tokenizer as its tensors are gathered, so that they need no memory.

    Yields what takes some tensors at a time, by their names in the model, and does not raise, since other ranks go on;
    errors are raised at the end. None where transformers stores other tensors than the model has, as of fused experts.

    Args:
        model: on the meta device.
    """
    from grpo_engine.models.tensor_files import FilesInParts, can_write

    bare = {name: parameter.detach() for name, parameter in model.named_parameters()}
    files: dict[Path, dict[str, Tensor]] = {}
    texts: dict[str, str] = {}

    def note(write: Write, content: dict[str, Tensor], path: str, *, metadata: Mapping[str, str]) -> None:
        files[Path(path)] = content
        texts.update(metadata)

    folder.mkdir(parents=True, exist_ok=True)
    with _files_written_by(note) as is_replaced:
        if is_replaced:
            model.save_pretrained(folder, state_dict=dict(bare), max_shard_size=_FILE_SIZE)
    stored = {name: tensor for content in files.values() for name, tensor in content.items()}
    if stored.keys() != bare.keys() or not all(stored[name] is bare[name] and can_write(bare[name]) for name in bare):
        for path in folder.iterdir():
            path.unlink()
        yield None
        return
    written = FilesInParts(files, texts)
    failures: list[Exception] = []

    def take(tensors: dict[str, Tensor]) -> None:
        if not failures:
            try:
                written.write(tensors)
            except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: of CUDA
                failures.append(error)

    try:
        yield take
    finally:
        written.close()
    for failure in failures:
        raise failure
    written.require_all()


class _Replaced:
    """The function of transformers that writes one file, while threads have it replaced."""

    lock = threading.Lock()
    num_threads = 0
    original: Write
    of_thread = threading.local()
    """`write`: what the thread writes files by."""


@contextmanager
def _files_written_by(write: Callable[..., None]) -> Iterator[bool]:
    """Within, transformers writes files in this thread by `write`, whose first argument is its own function.

    Other threads may write models meanwhile. Yields whether transformers has a function of that name.
    """
    from transformers import modeling_utils

    if not hasattr(modeling_utils, _WRITER):
        yield False
        return
    with _Replaced.lock:
        if _Replaced.num_threads == 0:
            _Replaced.original = getattr(modeling_utils, _WRITER)
            setattr(modeling_utils, _WRITER, _write_by_thread)
        _Replaced.num_threads += 1
    _Replaced.of_thread.write = write
    try:
        yield True
    finally:
        del _Replaced.of_thread.write
        with _Replaced.lock:
            _Replaced.num_threads -= 1
            if _Replaced.num_threads == 0:
                setattr(modeling_utils, _WRITER, _Replaced.original)


def _write_by_thread(*arguments: Any, **options: Any) -> None:
    original = _Replaced.original
    write = getattr(_Replaced.of_thread, "write", None)
    if write is None:
        original(*arguments, **options)
    else:
        write(original, *arguments, **options)


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
