"""Items out of what a user's module gives: a list, a data set, a mapping of splits, or a function that makes or yields.

A list is reshuffled at every pass, what is yielded comes in its own order, again from the start when it ends. Where the
user does not say what is held out, one question in sixteen is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from grpo_engine.environments.tasks.base import Item, Split, belongs_to, plain
from grpo_engine.environments.tasks.loading import told
from grpo_engine.environments.tasks.records import endless, of_split
from grpo_engine.errors import ConfigError

_MAX_UNWANTED = 10_000
"""Items in a row of another split; more of them means that the split holds nothing."""

ReadItem = Callable[[Any, str], Item]
"""Makes an item of what the user gave and where that was."""


def own_items(source: Any, read: ReadItem, *, where: str, task: str, seed: int, split: Split) -> Iterator[Item]:
    """Endless items of a split.

    Args:
        source: what the module holds: data, or a function of `split` and `seed`, as far as it takes them.

    Raises:
        ConfigError: it fails, is none of these, or has nothing of the split.
    """
    train, held_out = _parts(source, where, seed)
    if _is_list(train) and (held_out is None or _is_list(held_out)):
        chosen = of_split(
            split,
            [read(record, f"{where}[{number}]") for number, record in enumerate(train)],
            None if held_out is None else [read(record, f"{where}[{n}]") for n, record in enumerate(held_out)],
            where=where,
            instead="give more items, or let the function take `split` and give other ones for 'held_out'",
        )
        return endless(chosen, task=task, seed=seed, split=split)
    if held_out is None:
        return _yielded(source, read, where, seed, split, 0, lambda item: belongs_to(split, item.question))
    if split == "held_out":
        return _yielded(source, read, where, seed, split, 1, lambda item: True)
    kept_back = {plain(read(record, where).question) for record in held_out} if _is_list(held_out) else set()
    return _yielded(source, read, where, seed, split, 0, lambda item: plain(item.question) not in kept_back)


def _parts(source: Any, where: str, seed: int) -> tuple[Any, Any]:
    """What is given to train on, and what is held out; None where that is a part of the first."""
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
    # A data set of the hub says `test`.
    return given["train"], given.get("held_out", given.get("test"))


def _called(source: Callable[..., Any], where: str, seed: int, split: Split | None) -> Any:
    known = {"seed": seed, "split": split}
    arguments = {name: value for name, value in known.items() if name in inspect.signature(source).parameters}
    try:
        return source(**arguments)
    # The user's function can fail in any way.
    except Exception as error:
        raise ConfigError(f"{where} failed: {told(error)}") from error


def _check_iterable(given: Any, where: str) -> None:
    if not isinstance(given, Iterable):
        raise ConfigError(f"{where} gave {given!r}: it must be items, or return or yield them, and not be async")


def _is_list(given: Any) -> bool:
    return hasattr(given, "__len__") and hasattr(given, "__getitem__")


def _yielded(
    source: Any, read: ReadItem, where: str, seed: int, split: Split, part: int, is_wanted: Callable[[Item], bool]
) -> Iterator[Item]:
    """What the function yields, again and again."""
    num_unwanted = 0
    while True:
        num_found = 0
        for record in _until_it_fails(_parts(source, where, seed)[part], where):
            item = read(record, where)
            num_found += is_wanted(item)
            num_unwanted = 0 if is_wanted(item) else num_unwanted + 1
            if num_unwanted > _MAX_UNWANTED:
                break
            if is_wanted(item):
                yield item
        if num_found == 0 or num_unwanted > _MAX_UNWANTED:
            raise ConfigError(
                f"{where} has no {split} item, or it can be gone through only once: give a function that yields more "
                "items each time it is called"
            )


def _until_it_fails(given: Any, where: str) -> Iterator[Any]:
    try:
        yield from given
    except GeneratorExit:
        raise
    # The user's generator can fail in any way.
    except Exception as error:
        raise ConfigError(f"{where} failed: {told(error)}") from error
