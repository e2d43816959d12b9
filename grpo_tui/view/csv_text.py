"""Tables as CSV that a spreadsheet does not execute: names of metrics and reasons of failures come from outside."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_BEGINS_A_FORMULA = frozenset("=+-@\t\n")


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A header and a line for each row; a cell that a row lacks, or that is None, is empty.

    Text that a spreadsheet would take for a formula begins with `'`; numbers, also as text, stay as they are.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, columns))
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    return text.getvalue()


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
