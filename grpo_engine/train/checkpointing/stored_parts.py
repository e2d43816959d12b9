"""Reads metadata and tensors in torch's distributed checkpoint format, which may be somebody else's work.

Torch's own reader would unpickle the metadata, and whatever is no tensor, and open whatever file the metadata names.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import replace
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from grpo_engine.wire.checkpoints import open_regular
from grpo_engine.wire.codec import MAX_FILE_BYTES

METADATA = ".metadata"
_SUFFIX = ".distcp"


def read_metadata(folder: Path) -> Metadata:
    """What is in the checkpoint whose files are in `folder`.

    Raises:
        CheckpointError, OSError: it, or a file of its tensors, cannot be read.
        Exception: of any class, where it is damaged.
    """
    with open_regular(folder / METADATA) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"longer than {MAX_FILE_BYTES:,} bytes")
    metadata = _PlainMetadata(io.BytesIO(content)).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):  # torch would unpickle its content
            raise pickle.UnpicklingError(f"{key} is no tensor")
        _check_tensor(key, entry)
    for index, stored in metadata.storage_data.items():
        _check_stored(index, stored)
    for name in {stored.relative_path for stored in metadata.storage_data.values()}:
        open_regular(folder / name).close()
    return metadata


class PartsReader(FileSystemReader):
    """Reads tensors only: torch's own would unpickle the metadata once more, or other files where that fails."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:  # without the parameters, by which torch asks for those other files
        return replace(self._metadata, storage_meta=StorageMeta(load_id=self.load_id))


class _PlainMetadata(pickle.Unpickler):
    """Reads `.metadata`, which torch pickles, with the classes that it has there; others could run code."""

    _ALLOWED = frozenset(
        {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("pathlib", "PosixPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # by which Python 3.11.0 to 3.11.3 pickle the member of an enumeration
        is_known = (module, name) in self._ALLOWED or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not is_known and (module != "torch.distributed.checkpoint.metadata" or "." in name):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has")
        found = super().find_class(module, name)
        if not is_known and getattr(found, "__module__", None) != module:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has")
        return found


def _member(enumeration: Any, name: Any) -> Enum:
    if not (isinstance(enumeration, EnumType) and isinstance(name, str)):
        raise pickle.UnpicklingError("it asks for an attribute of what is no enumeration")
    return enumeration[name]


def _check_tensor(key: str, entry: TensorStorageMetadata) -> None:
    properties, chunks = entry.properties, entry.chunks
    is_right = (
        isinstance(properties, TensorProperties)
        and isinstance(properties.dtype, torch.dtype)
        and isinstance(entry.size, torch.Size)
        and isinstance(chunks, list)
        and all(isinstance(each, ChunkStorageMetadata) for each in chunks)
        and all(_is_within(each, entry.size) for each in chunks)
    )
    if not is_right:
        raise pickle.UnpicklingError(f"{key} has a size or parts that no tensor has")
    if sum(math.prod(each.sizes) for each in chunks) != math.prod(entry.size):
        raise pickle.UnpicklingError(f"{key}: its parts do not add up to it")


def _is_within(chunk: ChunkStorageMetadata, size: torch.Size) -> bool:
    offsets, sizes = chunk.offsets, chunk.sizes
    return (
        isinstance(offsets, torch.Size)
        and isinstance(sizes, torch.Size)
        and len(offsets) == len(sizes) == len(size)
        and all(
            begin >= 0 and 0 <= length <= end - begin for begin, length, end in zip(offsets, sizes, size, strict=True)
        )
    )


def _check_stored(index: MetadataIndex, stored: _StorageInfo) -> None:
    is_right = (
        isinstance(stored, _StorageInfo)
        and isinstance(stored.relative_path, str)
        and all(isinstance(each, int) and each >= 0 for each in (stored.offset, stored.length))
        and not stored.transform_descriptors
    )
    if not is_right:
        raise pickle.UnpicklingError(f"{index.fqn} is stored as no tensor is")
    name = stored.relative_path
    if Path(name).name != name or not name.endswith(_SUFFIX):
        raise pickle.UnpicklingError(f"{name!r:.300} is not a file of this folder")
