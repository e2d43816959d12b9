"""Reads metadata and tensors in torch's distributed checkpoint format, which may be somebody else's work.

Torch's own readers unpickle (see `plain_pickle`), open whatever file the metadata names, and unpack what is compressed.
"""

from __future__ import annotations

import io
import math
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from grpo_engine.train.checkpointing.plain_pickle import Opaque, PlainUnpickler
from grpo_engine.wire.checkpoints import open_regular
from grpo_engine.wire.codec import MAX_FILE_BYTES

METADATA = ".metadata"
_SUFFIX = ".distcp"
_MAX_BYTES_BESIDE = 64 * 1024
"""Of a stored tensor, besides its numbers: torch writes 1.5 kB."""
_COPIED_AT_ONCE = 16 << 20
_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def read_metadata(folder: Path) -> Metadata:
    """What is in the checkpoint whose files are in `folder`.

    Raises:
        CheckpointError, OSError: it cannot be read.
        Exception: of any class, where it is damaged.
    """
    with open_regular(folder / METADATA) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"longer than {MAX_FILE_BYTES:,} bytes")
    metadata = _MetadataUnpickler().load(content)
    if not isinstance(metadata, Metadata):
        raise UnpicklingError(f"it is a {type(metadata).__name__}")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):  # torch would unpickle its content
            raise UnpicklingError(f"{key} is no tensor")
        _check_tensor(key, entry)
    for index, stored in metadata.storage_data.items():
        _check_stored(index, stored)
    return metadata


class PartsReader(FileSystemReader):
    """Reads tensors only, of the files in its folder."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder, self._metadata = folder, metadata

    def read_metadata(self) -> Metadata:
        """As it was read before; without parameters, by which torch asks for files of single ranks where this fails."""
        return replace(self._metadata, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every part of the plan into its place.

        Raises:
            CheckpointError, OSError: a file is missing, or none of the folder.
            ValueError, UnpicklingError, zipfile.BadZipFile: a part is damaged.
        """
        for item in plan.items:
            stored: _StorageInfo = self.storage_data[item.storage_index]
            target = planner.resolve_tensor(item).detach()
            entry = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[item.storage_index.fqn])
            [chunk] = [each for each in entry.chunks if each.offsets == item.storage_index.offset]
            with open_regular(self._folder / stored.relative_path) as file:
                whole = _read_tensor(_Archive(file, stored.offset, stored.length), chunk.sizes)
            part = narrow_tensor_by_index(whole, item.storage_offsets, item.lengths)
            if part.shape != target.shape:
                raise ValueError(f"{item.storage_index.fqn} is {tuple(part.shape)} instead of {tuple(target.shape)}")
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _MetadataUnpickler(PlainUnpickler):
    _KNOWN = frozenset(
        {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("pathlib", "PosixPath"),
        }
    )

    def find(self, module: str, name: str) -> Any:
        is_data_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        of_metadata = module == "torch.distributed.checkpoint.metadata"
        if not (is_data_type or of_metadata or (module, name) in self._KNOWN):
            return super().find(module, name)
        found = getattr(sys.modules[module], name, None)
        if of_metadata and not (isinstance(found, type) and found.__module__ == module):
            return super().find(module, name)
        return found

    def is_key(self, value: object) -> bool:
        return isinstance(value, str) or (
            type(value) is MetadataIndex
            and type(value.fqn) is str
            and (value.offset is None or type(value.offset) is torch.Size)
        )


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
        raise UnpicklingError(f"{key} has a size or parts that no tensor has")
    if sum(math.prod(each.sizes) for each in chunks) != math.prod(entry.size):
        raise UnpicklingError(f"{key}: its parts do not add up to it")


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
        raise UnpicklingError(f"{index.fqn} is stored as no tensor is")
    name = stored.relative_path
    if Path(name).name != name or not name.endswith(_SUFFIX):
        raise UnpicklingError(f"{name!r:.300} is not a file of this folder")


class _Storage(Opaque):
    """The numbers of a tensor, by the name of their file in the archive."""

    def __init__(self, dtype: torch.dtype, name: str, num_values: int) -> None:
        self.dtype, self.name, self.num_values = dtype, name, num_values


class _DataType(Opaque):
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How a tensor lies in its storage."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _TensorUnpickler(PlainUnpickler):
    def find(self, module: str, name: str) -> Any:
        match module, name:
            case "torch._utils", "_rebuild_tensor_v2":
                return _layout
            case "collections", "OrderedDict":
                return Opaque
            case "torch", _ if name in _DTYPES:
                return _DataType(_DTYPES[name])
            case _:
                return super().find(module, name)

    def persistent(self, reference: Any) -> Opaque:
        kind, data_type, name, _, num_values = reference
        if kind != "storage" or not isinstance(data_type, _DataType) or not isinstance(name, str):
            return super().persistent(reference)
        return _Storage(data_type.dtype, name, num_values)


def _layout(storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> _Layout:
    return _Layout(storage=storage, offset=offset, size=size, stride=stride)


class _Archive(io.RawIOBase):
    """The archive of one tensor, a part of a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0
        self.longest_read = _MAX_BYTES_BESIDE
        """Of the list of what is in it, at first: it claims how long it is, and takes ten times as much in memory."""

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")  # as `zipfile` expects it of a file
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size < 0 else min(size, left)
        if size > self.longest_read:
            raise ValueError(f"a part has {size} bytes besides its numbers, more than any checkpoint")
        self._file.seek(self._begin + self._at)
        content = self._file.read(size)
        self._at += len(content)
        return content


def _read_tensor(archive: _Archive, size: torch.Size) -> Tensor:
    """The tensor in an archive of `torch.save`, of this size.

    Raises:
        ValueError, UnpicklingError, zipfile.BadZipFile: it has another one, or something else in it.
    """
    with zipfile.ZipFile(cast(BinaryIO, archive)) as file:
        entries = {entry.filename.partition("/")[2]: entry for entry in file.infolist()}
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise ValueError("a part is compressed, which no checkpoint is")
        if entries["data.pkl"].file_size > _MAX_BYTES_BESIDE:
            raise ValueError("the description of a part is too long")
        if "byteorder" in entries and file.read(entries["byteorder"]) != sys.byteorder.encode():
            raise ValueError(f"a part is not {sys.byteorder}-endian, as this machine is")
        layout = _TensorUnpickler().load(file.read(entries["data.pkl"]))
        if not isinstance(layout, _Layout) or layout.size != tuple(size):
            raise ValueError(f"a part is no tensor of {tuple(size)}")
        storage, entry = layout.storage, entries[f"data/{layout.storage.name}"]
        if storage.num_values != math.prod(size) or entry.file_size != storage.num_values * storage.dtype.itemsize:
            raise ValueError(f"a part of {tuple(size)} is stored with {entry.file_size} bytes")
        values = torch.empty(storage.num_values, dtype=storage.dtype)
        target = values.view(torch.uint8).numpy().data
        archive.longest_read = _COPIED_AT_ONCE
        with file.open(entry) as source:
            for begin in range(0, len(target), _COPIED_AT_ONCE):
                piece = source.read(min(_COPIED_AT_ONCE, len(target) - begin))
                target[begin : begin + len(piece)] = piece
    return values.as_strided(layout.size, layout.stride, layout.offset)
