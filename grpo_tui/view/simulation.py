"""What `grpo-tui simulate` shows: a table, bars, and what follows from them in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_engine.simulate.result import Result
from grpo_tui.view.format import count_text, percent_text
from grpo_tui.view.training_rules import MUCH_WAITING, who_waits

BAR_COLUMNS = 40
GOOD_ENOUGH = 0.97
"""Of the best speed, with which the lowest staleness is recommended: less is not worth older groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One row."""

    result: Result
    machines: int | None = None
    """None: the stack as the profile has it."""


def bound_text(bound: int | None) -> str:
    """A staleness bound."""
    return "unset" if bound is None else str(bound)


def rows_of(all_: Sequence[Simulated]) -> list[tuple[str, ...]]:
    """The table, its head first."""
    head = (
        "machines", "trainer ranks", "servers", "max_staleness", "s a step", "tokens/s", "trainer waits",
        "sampling waits", "staleness", "oldest", "dropped a step",
    )  # fmt: skip
    rows = [
        (
            "–" if each.machines is None else str(each.machines),
            str(each.result.layout.num_ranks),
            str(each.result.layout.num_servers),
            bound_text(each.result.layout.max_staleness),
            f"{each.result.interval_s:.3g}",
            f"{each.result.tokens_per_s:,.0f}",
            percent_text(100 * each.result.trainer_waits),
            percent_text(100 * each.result.generation_waits),
            f"{each.result.staleness_mean:.2f}",
            str(each.result.stalest),
            f"{each.result.dropped_per_step:.2g}",
        )
        for each in all_
    ]
    first = 1 if all(each.machines is None for each in all_) else 0
    return [row[first:] for row in (head, *rows)]


def bars_of(all_: Sequence[Simulated]) -> list[str]:
    """A bar of tokens a second for each row."""
    most = max(each.result.tokens_per_s for each in all_)
    labels = [label(each) for each in all_]
    width = max(map(len, labels))
    return [
        f"{text:<{width}}  {'█' * max(1, round(BAR_COLUMNS * each.result.tokens_per_s / most))} "
        f"{each.result.tokens_per_s:,.0f} tokens/s"
        for text, each in zip(labels, all_, strict=True)
    ]


def label(each: Simulated) -> str:
    """What tells a row from the others."""
    layout = each.result.layout
    where = "" if each.machines is None else f"{each.machines} × "
    return f"{where}{layout.num_ranks} : {layout.num_servers}, S {bound_text(layout.max_staleness)}"


def best_of(all_: Sequence[Simulated]) -> Simulated:
    """Of the rows that are nearly as fast as the fastest, the one with the least staleness and then machines."""
    fastest = max(each.result.tokens_per_s for each in all_)
    near = [each for each in all_ if each.result.tokens_per_s >= GOOD_ENOUGH * fastest]
    return min(near, key=lambda each: (each.machines or 0, each.result.staleness_mean))


def advice(all_: Sequence[Simulated], configured: int | None) -> list[str]:
    """Which side waits, which bound suffices, and in what ratio trainers and servers should be.

    Args:
        configured: the staleness bound of the profile.
    """
    best = best_of(all_)
    layout = best.result.layout
    of_bounds = {each.result.layout.max_staleness for each in all_}
    lines = []
    if len(of_bounds) > 1:
        has = "leaves it unset" if configured is None else f"has {configured}"
        lines.append(
            f"max_staleness {bound_text(layout.max_staleness)} suffices: {best.result.tokens_per_s:,.0f} tokens/s, and "
            f"the fastest has {max(each.result.tokens_per_s for each in all_):,.0f}; the profile {has}"
        )
    sides = f"{count_text(layout.num_ranks, 'trainer rank')} : {count_text(layout.num_servers, 'server')}"
    found = who_waits(best.result.trainer_busy, best.result.generation_busy)
    if found is not None:
        return [*lines, f"{sides}: {found[0]}", f"→ {found[1]}"]
    for_groups, for_trainer = best.result.trainer_waits, best.result.generation_waits
    is_balanced = max(for_groups, for_trainer) < MUCH_WAITING
    lines.append(
        f"{sides}: the trainer waits for groups {100 * for_groups:.0f}% of the time, and environments for it "
        f"{100 * for_trainer:.0f}%" + (": neither for long" if is_balanced else "")
    )
    return lines


def document(all_: Sequence[Simulated], lines: Sequence[str], sources: Sequence[str]) -> dict[str, Any]:
    """As `--json` prints it."""
    return {
        "sources": list(sources),
        "rows": [
            {
                "machines": each.machines,
                "trainer_ranks": each.result.layout.num_ranks,
                "servers": each.result.layout.num_servers,
                "environments": each.result.layout.num_environments,
                "batch_size": each.result.layout.batch_size,
                **{key: value for key, value in asdict(each.result).items() if key != "layout"},
                "max_staleness": each.result.layout.max_staleness,
            }
            for each in all_
        ],
        "advice": list(lines),
    }
