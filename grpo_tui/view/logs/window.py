"""Read whole lines of a log from any place in either direction, a block at a time: a file of gigabytes opens at once.

Places are absolute offsets as in `grpo_tui.run_files.log_file`, so they hold while the oldest part of the log is
dropped under the reader. A line longer than `MOST_BYTES` comes in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_tui.run_files.log_file import Part, Place, read_part

FEWEST_BYTES = 64 * 1024
"""The first block: enough for a screen of lines."""
MOST_BYTES = 1024 * 1024
"""Later blocks grow up to this: larger ones are searched no faster, as they leave the processor's cache."""


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a log; only its very last line may lack its end."""

    data: bytes
    offset: int
    """Absolute, of the first byte, where a line begins."""

    @property
    def end(self) -> int:
        """Absolute, behind the last byte."""
        return self.offset + len(self.data)


def blocks_after(descriptor: int, start: int, end: int) -> Iterator[Block]:
    """Read from where a line begins up to `end`; what was dropped is passed over."""
    num_bytes = FEWEST_BYTES
    while start < end:
        part = readable_part(descriptor, start, min(num_bytes, end - start))
        if part.offset < start:
            return  # emptied by hand: what follows is another log
        data = part.data[: max(0, end - part.offset)]
        if not data:
            return
        if part.offset + len(data) < end:
            whole = data.rfind(b"\n") + 1
            if not whole and num_bytes < MOST_BYTES:
                num_bytes = min(2 * num_bytes, MOST_BYTES)
                continue
            data = data[: whole or len(data)]
        yield Block(data, part.offset)
        start = part.offset + len(data)
        num_bytes = min(2 * num_bytes, MOST_BYTES)


def blocks_before(descriptor: int, end: int) -> Iterator[Block]:
    """Read from where a line begins (or the log ends) towards the start of the log, the last block first."""
    num_bytes = FEWEST_BYTES
    while end > 0:
        part = readable_part(descriptor, max(0, end - num_bytes), min(num_bytes, end))
        data = part.data[: max(0, end - part.offset)]
        if not data:
            return
        is_first = part.offset <= part.place.dropped
        offset = part.offset
        if not is_first:
            torn = data.find(b"\n") + 1
            if torn in (0, len(data)):
                if num_bytes < MOST_BYTES:
                    num_bytes = min(2 * num_bytes, MOST_BYTES)
                    continue
                torn = 0
            data, offset = data[torn:], offset + torn
        yield Block(data, offset)
        if is_first:
            return
        end = offset
        num_bytes = min(2 * num_bytes, MOST_BYTES)


def line_start(descriptor: int, offset: int) -> int:
    """Where the line begins that holds the byte at `offset`, or that was cut there."""
    block = next(blocks_before(descriptor, offset), None)
    return offset if block is None else block.offset + block.data.rfind(b"\n") + 1


def readable_part(descriptor: int, start: int, max_bytes: int) -> Part:
    """As `read_part`; nothing where the disk fails: as if the log ended there."""
    try:
        return read_part(descriptor, start, max_bytes)
    except OSError:
        return Part(b"", start, Place(0, 0, 0))
