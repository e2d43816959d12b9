"""Encoding for pipes, sockets and files: one JSON object per line, and files that are replaced atomically.

The messages are defined in the modules beside it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Self, TypeVar

import pydantic_core
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, SchemaValidator

from grpo_engine.errors import PeerError

MAX_LINE_BYTES = 8 * 1024 * 1024
"""Longest line that is read: a snapshot of a large run has about 100 kB, and a foreign process must not fill memory."""

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Of a file of JSON that is read whole: markers, notes and states of ours have less than half of it."""
MAX_FILE_MARKS = 4 * 1024 * 1024
"""Brackets, braces and quotes of such a file: see `num_marks`."""
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""At the end of a journal of SQLite that names a super-journal."""
MAX_HOLES_BYTES = 256 * 1024 * 1024
"""In a file; nothing that a run writes has holes. An archive of some kB may hold a file of 100 GB, all hole."""

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A count, step, size or number of a process: one that no program writes is damaged, and no float holds 10^400."""
Pid = Annotated[int, Field(ge=1, lt=2**31)]
"""Of a process that was seen: the kernel takes no other, and 0 and below mean groups of processes."""
Ticks = Annotated[int, Field(ge=0, lt=2**63)]
"""Start time of a process, in clock ticks since boot."""
Time = Annotated[float, Field(ge=-1e11, le=1e11)]
"""Unix seconds of which a calendar can be made, up to the year 5138."""

_COLLECTIONS = frozenset({"list", "tuple", "set", "frozenset", "dict"})
_NO_SCHEMAS = frozenset({"cls", "default", "metadata", "serialization"})
"""Keys of a core schema below which nothing is validated."""
_SHOWN_CHARS = 300
"""Of a fault: its key may be one of the peer's, of any length."""

MessageT = TypeVar("MessageT", bound="Message")
ReadT = TypeVar("ReadT")


def failing_fast(schema: Any) -> Any:
    """A core schema of pydantic whose collections, at any depth, end validation at their first invalid item."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(failing_fast, schema))
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    is_schema = isinstance(kind, str)  # else one by name, as the fields of a model
    changed = {key: value if is_schema and key in _NO_SCHEMAS else failing_fast(value) for key, value in schema.items()}
    return changed | {"fail_fast": True} if is_schema and kind in _COLLECTIONS else changed


def fail_fast(adapter: TypeAdapter[ReadT]) -> TypeAdapter[ReadT]:
    """Have the adapter of a type that is no `Message` validate up to the first invalid item of each collection."""
    adapter.validator = SchemaValidator(failing_fast(adapter.core_schema), _use_prebuilt=False)
    return adapter


class Message(BaseModel):
    """Base of messages between processes: unknown keys are ignored, so that a newer peer may add some.

    Validation ends at the first invalid item of a collection: of a list of millions each would be an error of its own,
    which takes half a kilobyte.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The fields as they are declared, with collections that fail fast."""
        schema: CoreSchema = failing_fast(handler(source))
        return schema

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """As pydantic's, which copies a whole object into the error of each key that it lacks; here they share one."""
        try:
            value = pydantic_core.from_json(json_data)
        except ValueError:
            return super().model_validate_json(json_data, **options)  # which says where, as a ValidationError
        return cls.model_validate(value, **options)


def to_line(message: BaseModel) -> bytes:
    """One line of JSON with its newline; rejects NaN and infinities, which are not valid JSON."""
    return message.model_dump_json().encode() + b"\n"


def from_line(kind: type[MessageT], line: bytes, *, peer: str) -> MessageT:
    """Read one line.

    Raises:
        PeerError: the line is not JSON, or not of this kind; names the peer and the first fault.
    """
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        raise PeerError(f"{peer}: not a {kind.__name__}: {first_fault(error)}: {line[:120]!r}") from None


def first_fault(error: ValidationError) -> str:
    """The key of the first invalid value and what is wrong with it, without the value itself."""
    fault = error.errors(include_input=False, include_url=False, include_context=False)[0]
    where = ".".join(map(str, fault["loc"]))
    return shortened(f"{where}: {fault['msg']}" if where else fault["msg"])


def num_marks(part: bytes) -> int:
    """Brackets, braces and quotes: a list of two bytes takes 60 to 240 once it is parsed as JSON."""
    return sum(map(part.count, (b"[", b"{", b'"')))


def shortened(text: str, most: int = _SHOWN_CHARS) -> str:
    """The beginning of a text of a peer, as a message shows it."""
    return text if len(text) <= most else f"{text[:most]}…"


Reason = Annotated[str, AfterValidator(partial(shortened, most=1000))]
"""Why a peer did not do what was asked, for people; of one of any length the beginning is kept."""


def open_file(path: Path, *, follows_link: bool = True) -> BinaryIO:
    """Open a regular file that may be somebody else's work: no pipe blocks.

    Raises:
        OSError: it is missing or cannot be read; with `EINVAL` it is a pipe, a device or a folder, and with `ELOOP` a
            link that is not to be followed.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows_link else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def require_regular(path: Path) -> None:
    """Refuse a file that a library is to open: a pipe in its place would hold the process, safetensors even its GIL.

    Raises:
        OSError: as `open_file`.
    """
    open_file(path).close()


def require_own_journal(database: Path) -> None:
    """Refuse a database of SQLite whose rollback journal names a super-journal, which SQLite deletes as it opens it.

    That may be any file of ours; only a transaction over several databases has one, and ours are of one.

    Raises:
        OSError: it does, or the journal cannot be read.
    """
    with suppress(FileNotFoundError), open_file(Path(f"{os.path.realpath(database)}-journal")) as journal:
        journal.seek(max(0, os.fstat(journal.fileno()).st_size - len(_SUPER_JOURNAL)))
        if journal.read() == _SUPER_JOURNAL:
            raise OSError("its journal names another file, which SQLite would delete")


def require_written(file: BinaryIO) -> None:
    """Refuse a file that is mostly holes: to read it takes memory, and to copy it room on the disk, that it has not.

    Raises:
        OSError: it is.
    """
    if may_be_hollow(os.fstat(file.fileno())) and _has_hole(file.fileno()):
        raise OSError(errno.EFBIG, f"longer than what was written in it, by more than {MAX_HOLES_BYTES:,} bytes")


def may_be_hollow(status: os.stat_result) -> bool:
    """Whether much of a file has no place on the disk: it was never written, or the file system compresses it."""
    return status.st_size - 512 * status.st_blocks > MAX_HOLES_BYTES


def _has_hole(descriptor: int) -> bool:
    with suppress(OSError):  # a file system that does not tell
        size = os.fstat(descriptor).st_size
        try:
            return os.lseek(descriptor, 0, os.SEEK_HOLE) < size
        finally:
            os.lseek(descriptor, 0, os.SEEK_SET)
    return False


def read_whole(path: Path, *, max_bytes: int = MAX_FILE_BYTES, max_marks: int = MAX_FILE_MARKS) -> bytes:
    """The content of a file of JSON that may be somebody else's work, of a length that it can have.

    Raises:
        OSError: it is missing or cannot be read, is no regular file, or is longer than any that is written.
    """
    with open_file(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"longer than {max_bytes:,} bytes")
    if num_marks(content) > max_marks:
        raise OSError(errno.EFBIG, f"more than {max_marks:,} brackets, braces and quotes")
    return content


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` atomically: readers see the old content or the new, also after a crash.

    Raises:
        OSError: it cannot be written, or is a device: root could replace `/dev/null` for the whole machine.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISCHR(kind := path.lstat().st_mode) or stat.S_ISBLK(kind):
            raise OSError(errno.EINVAL, "a device, which is not replaced by a file")
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)  # of an earlier process with this number, or laid there by another user
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_json_atomically(path: Path, value: BaseModel | dict[str, Any], *, mode: int = 0o644) -> None:
    """Replace `path` atomically with indented JSON."""
    text = value.model_dump_json(indent=1) if isinstance(value, BaseModel) else json.dumps(value, indent=1)
    write_atomically(path, text.encode() + b"\n", mode=mode)
