"""Tables as CSV that a spreadsheet does not execute: names of metrics and reasons of failures come from outside."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

_BEGINS_A_FORMULA = frozenset("=+-@\t\n")


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """All of `csv_rows`."""
    return "".join(csv_rows(columns, rows))


def csv_rows(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A header and a line for each row, with its line feed; a cell that a row lacks, or that is None, is empty.

    Text that a spreadsheet would take for a formula begins with `'`; numbers, also as text, stay as they are.
    """
    for cells in chain([columns], ([row.get(column) for column in columns] for row in rows)):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(map(_cell, cells))
        yield text.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    value = value.replace("\r", "\n")  # `csv` does not quote it, though readers take it for the end of a row
    try:
        float(value)
    except ValueError:
        first = unicodedata.normalize("NFKC", value[:1])  # also in full width
        return f"'{value}" if first in _BEGINS_A_FORMULA else value
    return value
