"""What the board shows: runs and sweeps, which are marked and folded, their order, and the filter. Pure.

A sweep is a row with its runs below it; the runs of one sweep stay together in every order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import assert_never

from grpo_engine.wire.supervisor import RunState, Warning
from grpo_tui.view.metrics.summary import Score
from grpo_tui.view.progress import Progress

NO_PROGRESS = Progress()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardRun:
    """A run as its files show it; None is unknown."""

    folder: Path
    state: RunState | None = None
    """None if its files cannot be read."""
    profile: str = ""
    is_live: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    began_at: float = 0.0
    """When its folder was launched last, in Unix seconds."""
    progress: Progress = NO_PROGRESS
    reward: float | None = None
    """The mean of its last steps."""
    rewards: tuple[tuple[int, float], ...] = ()
    """(step, reward) at places spread over the run."""
    warnings: tuple[Warning, ...] = ()
    gpus: tuple[int, ...] = ()
    services: str = ""
    """Each with its state, in words."""
    note: str = ""
    """Why it failed, or cannot be read."""
    sweep: Path | None = None
    """The folder of the sweep that it is a point of."""
    label: str = ""
    """The settings of its point."""

    @property
    def key(self) -> str:
        """Tells it from all other rows."""
        return str(self.folder)

    @property
    def name(self) -> str:
        """Its id."""
        return self.folder.name

    @property
    def state_word(self) -> str:
        """`running`; `unknown` where its files cannot be read."""
        return "unknown" if self.state is None else str(self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSweep:
    """A sweep as its folder shows it."""

    folder: Path
    num_points: int | None = None
    """None: its table cannot be read."""
    is_running: bool = False
    """Whether a command starts runs of it."""
    best: Score | None = None
    """Of its best settings, over their seeds."""
    best_label: str = ""
    began_at: float = 0.0

    @property
    def key(self) -> str:
        """Tells it from all other rows."""
        return str(self.folder)

    @property
    def name(self) -> str:
        """Its name."""
        return self.folder.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the list: a run, or a sweep."""

    run: BoardRun | None = None
    sweep: BoardSweep | None = None
    runs: tuple[BoardRun, ...] = ()
    """Of the sweep, or the run alone: what marks and `D` are about."""
    is_inside: bool = False
    """Whether it stands below its sweep."""
    is_folded: bool = False

    @property
    def key(self) -> str:
        """Of the run or the sweep."""
        one = self.run or self.sweep
        assert one is not None
        return one.key

    @property
    def is_live(self) -> bool:
        """Whether anything of it runs."""
        return any(run.is_live for run in self.runs) or (self.sweep is not None and self.sweep.is_running)


class Order(StrEnum):
    """By what rows are sorted."""

    NEWEST = "newest"
    """Live ones first, then by when they began."""
    NAME = "name"
    STATE = "state"
    REWARD = "reward"
    TIME_LEFT = "time left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The state of the board."""

    runs: tuple[BoardRun, ...] = ()
    sweeps: tuple[BoardSweep, ...] = ()
    is_read: bool = False
    """Whether all runs were read once."""
    now: float = 0.0
    selected: str | None = None
    """The key of a row; None: the first."""
    marked: tuple[str, ...] = ()
    """Keys of runs, in the order in which they were marked."""
    folded: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))
    """Sweeps that were folded or unfolded by hand; of the others those that run are unfolded."""
    order: Order = Order.NEWEST
    is_reversed: bool = False
    query: str = ""
    is_typing: bool = False
    """Whether the filter is being typed."""
    said: str = ""
    """The answer to the last key."""
    is_read_only: bool = False

    @property
    def chosen(self) -> tuple[BoardRun, ...]:
        """The marked runs; without any, those of the selected row."""
        by_key = {run.key: run for run in self.runs}
        marked = tuple(by_key[key] for key in self.marked if key in by_key)
        row = selected_row(self)
        return marked or (row.runs if row is not None else ())

    def run(self, key: str | None) -> BoardRun | None:
        """The run of a key."""
        return next((run for run in self.runs if run.key == key), None)


# --- changes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsRead:
    """All runs were looked at."""

    runs: tuple[BoardRun, ...]
    sweeps: tuple[BoardSweep, ...]
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The selection moved by so many rows."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The selection moved to a row."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkTurned:
    """The selected run, or all runs of the selected sweep, were marked, or their marks taken away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarksCleared:
    """All marks were taken away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The sweep of the selected row was folded or unfolded."""

    is_folded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderTurned:
    """The next order, or the same one the other way round."""

    is_reversed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """The filter was opened, typed into, taken or cleared."""

    query: str
    is_typing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A key was answered."""

    text: str


Change = RunsRead | Moved | Selected | MarkTurned | MarksCleared | Folded | OrderTurned | Filtered | Said


def after(board: Board, change: Change) -> Board:
    """The board after a change; a key takes the last answer away."""
    if not isinstance(change, RunsRead | Said) and board.said:
        board = replace(board, said="")
    match change:
        case RunsRead():
            keys = {run.key for run in change.runs}
            marked = board.marked if keys.issuperset(board.marked) else tuple(k for k in board.marked if k in keys)
            read = replace(board, runs=change.runs, sweeps=change.sweeps, now=change.now, is_read=True, marked=marked)
            return _near(board, read)
        case Moved():
            found = rows(board)
            place = _place(found, board.selected) + change.by
            return replace(board, selected=found[min(max(place, 0), len(found) - 1)].key) if found else board
        case Selected():
            return replace(board, selected=change.key)
        case MarkTurned():
            row = selected_row(board)
            keys_of_row = [run.key for run in row.runs] if row is not None else []
            new = [key for key in keys_of_row if key not in board.marked]
            rest = tuple(key for key in board.marked if key not in keys_of_row)
            return replace(board, marked=(*board.marked, *new) if new else rest)
        case MarksCleared():
            return replace(board, marked=())
        case Folded():
            return _folded(board, is_folded=change.is_folded)
        case OrderTurned(is_reversed=True):
            return replace(board, is_reversed=not board.is_reversed)
        case OrderTurned():
            orders = tuple(Order)
            return replace(board, order=orders[(orders.index(board.order) + 1) % len(orders)], is_reversed=False)
        case Filtered():
            narrowed = replace(board, query=change.query, is_typing=change.is_typing)
            keys_left = [row.key for row in rows(narrowed)]
            if board.selected not in keys_left and change.query != board.query:
                narrowed = replace(narrowed, selected=None)
            return narrowed
        case Said():
            return replace(board, said=change.text)
        case _:
            assert_never(change)


def _near(before: Board, read: Board) -> Board:
    """Keep the selection; where its row is gone, take the one that stands there now."""
    if before.selected is None or any(row.key == before.selected for row in rows(read)):
        return read
    place, found = _place(rows(before), before.selected), rows(read)
    return replace(read, selected=found[min(place, len(found) - 1)].key if found else None)


def _folded(board: Board, *, is_folded: bool) -> Board:
    row = selected_row(board)
    folder = None if row is None else row.sweep.folder if row.sweep else row.run.sweep if row.run else None
    if folder is None:
        return board
    folded = MappingProxyType({**board.folded, str(folder): is_folded})
    return replace(board, folded=folded, selected=str(folder) if is_folded else board.selected)


# --- rows ------------------------------------------------------------------------------------------------------------


def selected_row(board: Board) -> Row | None:
    """The row that keys act on; None on an empty board."""
    found = rows(board)
    return found[_place(found, board.selected)] if found else None


def rows(board: Board) -> list[Row]:
    """The lines of the list, from the top."""
    words = board.query.lower().split()
    by_sweep: dict[Path, list[BoardRun]] = {sweep.folder: [] for sweep in board.sweeps}
    alone = []
    for run in board.runs:
        if run.sweep in by_sweep:
            by_sweep[run.sweep].append(run)
        elif _has(words, _searched(run)):
            alone.append(Row(run=run, runs=(run,)))
    tops = alone
    for sweep in board.sweeps:
        runs = _sorted([Row(run=run, runs=(run,)) for run in by_sweep[sweep.folder]], board)
        found = [row for row in runs if row.run and _has(words, f"{sweep.name} {_searched(row.run)}")]
        if found or _has(words, sweep.name.lower()):
            is_folded = board.folded.get(sweep.key, not sweep.is_running) and not words
            members = tuple(row.runs[0] for row in found)
            tops.append(Row(sweep=sweep, runs=members, is_folded=is_folded))
    listed: list[Row] = []
    for row in _sorted(tops, board):
        listed.append(row)
        if row.sweep is not None and not row.is_folded:
            inside = _sorted([Row(run=run, runs=(run,), is_inside=True) for run in row.runs], board)
            listed += inside
    return listed


def _sorted(found: Sequence[Row], board: Board) -> list[Row]:
    return sorted(sorted(found, key=_newest), key=_KEYS[board.order], reverse=board.is_reversed)


def _place(found: Sequence[Row], key: str | None) -> int:
    return next((place for place, row in enumerate(found) if row.key == key), 0)


def _searched(run: BoardRun) -> str:
    return f"{run.name} {run.profile} {run.state_word} {run.label}".lower()


def _has(words: Sequence[str], text: str) -> bool:
    return all(word in text.lower() for word in words)


def row_name(row: Row) -> str:
    """The name of its run or sweep."""
    one = row.run or row.sweep
    return one.name if one is not None else ""


def row_reward(row: Row) -> float | None:
    """The reward of a run, or the best of a sweep."""
    if row.sweep is not None and row.sweep.best is not None:
        return row.sweep.best.value
    return max((run.reward for run in row.runs if run.reward is not None), default=None)


def row_state(row: Row) -> str:
    """The state of a run; of a sweep, whether it goes on."""
    if row.run is not None:
        return row.run.state_word
    return "running" if row.is_live else "ended"


def row_time_left(row: Row) -> float | None:
    """Seconds until the run ends; of a sweep, until the last of its live runs does."""
    return max((run.progress.time_left_s for run in row.runs if run.progress.time_left_s is not None), default=None)


def _newest(row: Row) -> tuple[bool, float]:
    times = [run.began_at for run in row.runs] + ([row.sweep.began_at] if row.sweep else [])
    return not row.is_live, -max(times, default=0.0)


def _first_known(value: float | None) -> tuple[bool, float]:
    """Unknown ones last."""
    return value is None, value or 0.0


_KEYS: Mapping[Order, Callable[[Row], tuple[object, ...]]] = MappingProxyType(
    {
        Order.NEWEST: _newest,
        Order.NAME: lambda row: (row_name(row),),
        Order.STATE: lambda row: (not row.is_live, row_state(row)),
        Order.REWARD: lambda row: _first_known(None if (reward := row_reward(row)) is None else -reward),
        Order.TIME_LEFT: lambda row: _first_known(row_time_left(row)),
    }
)
