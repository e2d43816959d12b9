"""The points of a sweep: every combination of the values of its settings, or some at random, with several seeds. Pure.

Points are numbered from 1 and follow from what was asked alone, so that a sweep that goes on finds the same ones.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from grpo_engine.config import toml_value
from grpo_engine.errors import ConfigError
from grpo_engine.wire.secrets import masked_settings

MAX_POINTS = 10_000
"""A larger grid is a mistake, or asks for `--random`."""
MAX_TEXT = 32 << 20
"""Characters of the settings of all points: each has all of them, so that one long value takes its length each time."""
_CLOSING = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep."""

    number: int
    settings: Mapping[str, Any]
    """Those that differ between points, by dotted key."""
    seed: int | None = None
    combination: int = 0
    """Number of its settings: the same for all seeds of them."""
    overrides: tuple[str, ...] = field(default=(), repr=False)
    """All of its settings, as `--set` takes them."""

    @property
    def label(self) -> str:
        """For people: `services.trainer.lr=0.0001 seed=2`."""
        shown = [f"{key}={shown_setting(key, value)}" for key, value in self.settings.items()]
        return " ".join([*shown, *([] if self.seed is None else [f"seed={self.seed}"])]) or "as the profile"


def values_of(override: str) -> tuple[str, list[Any]]:
    """The key and the values of `KEY=VALUE,VALUE…`; commas in brackets and quotes are part of a value.

    Raises:
        ConfigError: no key, an empty value, or one value twice.
    """
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override}: expected KEY=VALUE,VALUE…, as in services.trainer.lr=1e-4,1e-5")
    parts = [part.strip() for part in _split(text)]
    if len(parts) > 1 and "" in parts:
        raise ConfigError(f'--set {override}: a value is empty; write `""` for an empty text')
    return key.replace(" ", ""), checked_values(f"--set {override}", [toml_value(part) for part in parts])


def checked_values(where: str, values: Sequence[Any]) -> list[Any]:
    """The values of a setting.

    Raises:
        ConfigError: there is none, or one twice.
    """
    if not values:
        raise ConfigError(f"{where}: no value; give at least one")
    if len(values) > MAX_POINTS:
        raise ConfigError(f"{where}: {len(values)} values are more than {MAX_POINTS}: give fewer")
    twice = [value for place, value in enumerate(values) if value in values[:place]]
    if twice:
        raise ConfigError(
            f"{where}: {shown_value(twice[0])} is there twice: give each value once, and --seeds for more"
        )
    return list(values)


def _split(text: str) -> Iterable[str]:
    closers: list[str] = []
    quote, begin = "", 0
    for place, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[place - 1] != "\\" else quote
        elif char in "\"'":
            quote = char
        elif char in _CLOSING:
            closers.append(_CLOSING[char])
        elif closers and char == closers[-1]:
            closers.pop()
        elif char == "," and not closers:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


def points_of(
    settings: Mapping[str, Sequence[Any]],
    *,
    num_random: int | None = None,
    num_seeds: int | None = None,
    seed_keys: Sequence[str] = (),
) -> list[Point]:
    """The points of a grid, in the order of the settings: the last one changes first, and seeds before it.

    Args:
        settings: the values of each.
        num_random: so many combinations at random instead of all; the same ones each time.
        num_seeds: runs of each combination, with seeds from 0.
        seed_keys: the settings that take the seed.

    Raises:
        ConfigError: more points than `MAX_POINTS`.
    """
    total = prod(len(values) for values in settings.values())
    num_chosen = total if num_random is None else min(num_random, total)
    if (num := num_chosen * (num_seeds or 1)) > MAX_POINTS:
        raise ConfigError(f"{num} points are more than {MAX_POINTS}: --random N takes N combinations of the {total}")
    if total > sys.maxsize:
        raise ConfigError(f"{total} combinations are too many to choose from: give fewer values")
    chosen: Sequence[int] = range(total)
    if num_chosen < total:
        chosen = sorted(random.Random(0).sample(chosen, num_chosen))
    combinations = [(index, _combination(settings, index)) for index in chosen]
    varied = [key for key, values in settings.items() if len(values) > 1]
    return points_at(combinations, varied, num_seeds=num_seeds, seed_keys=seed_keys)


def points_at(
    combinations: Iterable[tuple[int, Mapping[str, Any]]],
    varied: Sequence[str],
    *,
    num_seeds: int | None = None,
    seed_keys: Sequence[str] = (),
) -> list[Point]:
    """The points of some combinations of settings, which have numbers; `varied` are the keys that differ.

    Raises:
        ConfigError: their settings have more than `MAX_TEXT` characters in all.
    """
    seeds: Sequence[int | None] = [None] if num_seeds is None else range(num_seeds)
    points: list[Point] = []
    num_chars = 0
    for number, combination in combinations:
        for seed in seeds:
            seeded = {} if seed is None else dict.fromkeys(seed_keys, seed)
            overrides = tuple(f"{key}={to_toml(value)}" for key, value in {**combination, **seeded}.items())
            num_chars += sum(map(len, overrides))
            if num_chars > MAX_TEXT:
                raise ConfigError(
                    f"the settings of all points have more than {MAX_TEXT:,} characters: shorten the longest"
                )
            shown = {key: combination[key] for key in varied}
            points.append(
                Point(number=len(points) + 1, settings=shown, seed=seed, combination=number, overrides=overrides)
            )
    return points


def _combination(settings: Mapping[str, Sequence[Any]], index: int) -> dict[str, Any]:
    places: dict[str, Any] = {}
    for key, values in reversed([*settings.items()]):
        index, place = divmod(index, len(values))
        places[key] = values[place]
    return {key: places[key] for key in settings}


def shown_value(value: Any) -> str:
    """A value as people read it: text without quotes."""
    return value if isinstance(value, str) else to_toml(value)


def masked_swept(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, without secrets."""
    return {key: masked_settings({(last := key.rpartition(".")[2]): value})[last] for key, value in settings.items()}


def shown_setting(key: str, value: Any) -> str:
    """The value of a setting as people read it, without secrets."""
    return shown_value(masked_swept({key: value})[key])


def to_toml(value: Any) -> str:
    """A value that TOML or `--set` gave, as TOML."""
    match value:
        case dict():
            return "{ " + ", ".join(f"{json.dumps(key)} = {to_toml(each)}" for key, each in value.items()) + " }"
        case list():
            return "[" + ", ".join(map(to_toml, value)) + "]"
        case bool() | str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return str(value)  # of numbers, inf, nan and dates
