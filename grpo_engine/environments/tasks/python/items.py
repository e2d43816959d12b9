"""Items from a user's module: a list, a data set, a mapping of splits, or a function that returns or yields them.

A list is reshuffled at every pass; yielded items keep their order, and start over when they end. If the user does not
define held-out items, one question in sixteen is held out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from grpo_engine.environments.tasks.base import Item, Split, belongs_to, plain
from grpo_engine.environments.tasks.python.loading import describe_error
from grpo_engine.environments.tasks.records import endless, of_split
from grpo_engine.errors import ConfigError

_MAX_OTHER_SPLIT = 10_000
"""Consecutive items of another split after which the split counts as empty."""

ReadItem = Callable[[Any, str], Item]
"""Converts a user's record and its location to an item."""


def items_from_module(source: Any, read: ReadItem, *, where: str, task: str, seed: int, split: Split) -> Iterator[Item]:
    """Endless items of a split.

    Args:
        source: attribute of the module: data, or a function that may take `split` and `seed`.

    Raises:
        ConfigError: it fails, has another type, or the split is empty.
    """
    train, held_out = _parts(source, where, seed)
    if _is_list(train) and (held_out is None or _is_list(held_out)):
        chosen = of_split(
            split,
            [read(record, f"{where}[{number}]") for number, record in enumerate(train)],
            None if held_out is None else [read(record, f"{where}[{n}]") for n, record in enumerate(held_out)],
            where=where,
            instead="add items, or let the function take `split` and return others for 'held_out'",
        )
        return endless(chosen, task=task, seed=seed, split=split)
    if held_out is None:
        return _yielded(source, read, where, seed, split, 0, lambda item: belongs_to(split, item.question))
    if split == "held_out":
        return _yielded(source, read, where, seed, split, 1, lambda item: True)
    excluded = {plain(read(record, where).question) for record in held_out} if _is_list(held_out) else set()
    return _yielded(source, read, where, seed, split, 0, lambda item: plain(item.question) not in excluded)


def _parts(source: Any, where: str, seed: int) -> tuple[Any, Any]:
    """Training and held-out records; None if held-out ones are part of the first."""
    if callable(source) and "split" in inspect.signature(source).parameters:
        both = _called(source, where, seed, "train"), _called(source, where, seed, "held_out")
        for given in both:
            _check_iterable(given, where)
        return both
    given = _called(source, where, seed, None) if callable(source) else source
    _check_iterable(given, where)
    if not isinstance(given, Mapping):
        return given, None
    if "train" not in given:
        raise ConfigError(f"{where} has the splits {', '.join(map(str, given))}: one of them must be called train")
    # Data sets on the hub call it `test`.
    return given["train"], given.get("held_out", given.get("test"))


def _called(source: Callable[..., Any], where: str, seed: int, split: Split | None) -> Any:
    known = {"seed": seed, "split": split}
    arguments = {name: value for name, value in known.items() if name in inspect.signature(source).parameters}
    try:
        return source(**arguments)
    # User code can raise anything.
    except Exception as error:
        raise ConfigError(f"{where} failed: {describe_error(error)}") from error


def _check_iterable(given: Any, where: str) -> None:
    if not isinstance(given, Iterable):
        raise ConfigError(
            f"{where} returned {given!r}: it must be items, or a function that returns or yields them, and not async"
        )


def _is_list(given: Any) -> bool:
    return hasattr(given, "__len__") and hasattr(given, "__getitem__")


def _yielded(
    source: Any, read: ReadItem, where: str, seed: int, split: Split, part: int, is_wanted: Callable[[Item], bool]
) -> Iterator[Item]:
    """The yielded items, repeated endlessly."""
    num_other_split = 0
    while True:
        num_found = 0
        for record in _with_errors(_parts(source, where, seed)[part], where):
            item = read(record, where)
            num_found += is_wanted(item)
            num_other_split = 0 if is_wanted(item) else num_other_split + 1
            if num_other_split > _MAX_OTHER_SPLIT:
                break
            if is_wanted(item):
                yield item
        if num_found == 0 or num_other_split > _MAX_OTHER_SPLIT:
            raise ConfigError(
                f"{where} has no {split} item, or can be iterated only once: use a function that yields "
                "items at every call"
            )


def _with_errors(given: Any, where: str) -> Iterator[Any]:
    try:
        yield from given
    except GeneratorExit:
        raise
    # User code can raise anything.
    except Exception as error:
        raise ConfigError(f"{where} failed: {describe_error(error)}") from error
