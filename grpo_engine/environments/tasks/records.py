"""Reads questions and answers from JSON Lines files, and repeats them endlessly in shuffled order."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_engine.config import did_you_mean
from grpo_engine.environments.tasks.base import Item, Split, belongs_to, generator, plain
from grpo_engine.errors import ConfigError, first_of
from grpo_engine.wire.codec import open_file, shortened

FIRST_LINES = 1000
"""Of a file, which a check before a start reads: a few milliseconds."""
MAX_LINE_CHARS = 16 << 20
"""No record is longer; a file without line ends would fill the memory."""
MAX_LINE_LISTS = 1 << 20
"""Brackets and braces of a record: parsed as JSON, they take thirty times their bytes."""
_MAYBE_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape of half a character: with its other half, the whole one."""
MAX_ANSWER_CHARS = 1 << 20
"""Of a reference answer, which is compared with each completion: one of 16 MB took 3 s each time."""
_FIELD_CHARS = 40
"""Of the name of a field in a message."""


def read_items(
    path: Path, *, question_field: str, answer_field: str, where: str, most_lines: int | None = None
) -> list[Item]:
    """Every record of a JSON Lines file, or of its first lines; other fields are ignored.

    Raises:
        ConfigError: the file cannot be read, is empty, or a field is missing or null; the message names the line.
    """
    items: list[Item] = []
    for number, record in read_records(path, where=where, most_lines=most_lines):
        for field in (question_field, answer_field):
            if field not in record:
                raise ConfigError(f"{where}: {path}:{number}: no field {field!r}{fields_instead(field, record)}")
            if record[field] is None:
                raise ConfigError(f"{where}: {path}:{number}: field {field!r} is null: set it, or remove the record")
        answer = answer_of(record[answer_field], f"{where}: {path}:{number}: field {answer_field!r}")
        items.append(Item(question=str(record[question_field]), answer=answer))
    return items


def answer_of(value: Any, where: str) -> str:
    """The text of a reference answer.

    Raises:
        ConfigError: it is longer than any that a completion can be compared with.
    """
    answer = str(value)
    if len(answer) > MAX_ANSWER_CHARS:
        raise ConfigError(f"{where}: {len(answer):,} characters; an answer has at most {MAX_ANSWER_CHARS:,}")
    return answer


def fields_instead(missing: str, record: Mapping[str, Any]) -> str:
    """For a message: the field that is meant, and those that the record has."""
    return f"{did_you_mean(missing, record)}; it has {first_of(shortened(str(name), _FIELD_CHARS) for name in record)}"


def read_records(path: Path, *, where: str, most_lines: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every object of a JSON Lines file, or of its first lines, with the number of its line; one at a time.

    Raises:
        ConfigError: the file cannot be read, has no record, or a line is no JSON object; the message names the line.
    """
    is_empty = True
    try:
        # Windows editors write a byte order mark. splitlines() would also split at U+2028, inside a text.
        with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="\n") as file:
            lines = islice(iter(lambda: file.readline(MAX_LINE_CHARS + 1), ""), most_lines)
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _record(line, f"{where}: {path}:{number}")
                    is_empty = False
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if is_empty:
        raise ConfigError(f"{where}: {path} has no record")


def _record(line: str, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_CHARS:
        raise ConfigError(f"{where}: longer than {MAX_LINE_CHARS:,} characters; one record stands on a line")
    if sum(map(line.count, "[{")) > MAX_LINE_LISTS:
        raise ConfigError(
            f"{where}: more than {MAX_LINE_LISTS:,} lists and objects, which no task reads: leave them out"
        )
    try:
        record = json.loads(line)
        if _MAYBE_HALF.search(line):
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{where}: has half a character (one of the escapes \\ud800 to \\udfff alone), which no tokenizer reads: "
            "remove it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: must be an object, not {type(record).__name__}")
    return record


def of_split(
    split: Split, records: Sequence[Item], held_out: Sequence[Item] | None, *, where: str, instead: str
) -> list[Item]:
    """The records of a split: one in sixteen questions is held out, or those of `held_out` are.

    Args:
        held_out: the held-out records, if they have their own source; training excludes them.
        where: the source, for messages.
        instead: what to do if the split is empty, for messages.

    Raises:
        ConfigError: the split is empty.
    """
    if held_out is None:
        chosen = [item for item in records if belongs_to(split, item.question)]
    elif split == "held_out":
        chosen = list(held_out)
    else:
        excluded = {plain(item.question) for item in held_out}
        chosen = [item for item in records if plain(item.question) not in excluded]
    if not chosen:
        raise ConfigError(f"{where} has no {split} record: {instead}")
    return chosen


def of_files(
    split: Split, path: Path, held_out_path: Path | None, read: Callable[[Path, str], list[Item]]
) -> list[Item]:
    """The records of a split, from a task's `path` and `held_out_path`; `read` is called with a file and its setting.

    Raises:
        ConfigError: a file cannot be read, or the split is empty.
    """
    return of_split(
        split,
        read(path, "task.path"),
        None if held_out_path is None else read(held_out_path, "task.held_out_path"),
        where=f"task.path: {path}",
        instead="set task.held_out_path, or add records",
    )


def endless(items: Sequence[Item], *, task: str, seed: int, split: Split) -> Iterator[Item]:
    """`items` repeated endlessly, in a new order each time."""
    rng = generator(task, seed, split)
    while True:
        yield from rng.sample(items, len(items))
