"""What a sweep was asked for: `sweep.toml` in its folder, which is also what `--from` reads.

```toml
profile = "/home/ann/profiles/tiny-cpu.toml"
jobs = 2
seeds = 3

[settings]
"services.trainer.lr" = [1e-4, 1e-5]
"services.trainer.loss" = "dapo"
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from grpo_engine.config import Config, RawTable, read_table, validated
from grpo_engine.errors import ConfigError
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.profile.loading import load_table
from grpo_tui.run_files.resolved import flat
from grpo_tui.sweeps.chooser import Sampler, range_of
from grpo_tui.sweeps.grid import MAX_POINTS, Point, checked_values, points_at, points_of, to_toml
from grpo_tui.sweeps.halving import Halving

HEAD = """\
# What this sweep was asked for: `grpo-tui sweep resume NAME` goes on with it, `grpo-tui sweep --from FILE --name OTHER`
# starts another one like it. Settings: a list has the values of a setting, one for each point.
"""


class Asked(Config):
    """The settings of a sweep."""

    profile: str
    """Name or file of the profile."""
    settings: dict[str, Any] = {}
    """By dotted key: a list of values, or one value for all points. Tables may be nested."""
    jobs: int = Field(1, ge=1)
    """Runs at a time."""
    seeds: int | None = Field(None, ge=1)
    """Runs of each combination, with seeds from 0."""
    random: int | None = Field(None, ge=1)
    """So many combinations at random instead of all."""
    optuna: int | None = Field(None, ge=1)
    """So many combinations, chosen by Optuna."""
    sampler: Sampler | None = None
    """How Optuna chooses: `tpe` (default), or `random`."""
    halving: Halving | None = None
    """End hopeless points early, by this rule."""
    gpus: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, min_length=1)
    """GPUs that the runs divide among them, each as many as the profile names."""
    id: str | None = None
    """Written by the sweep: tells it from another of the same name."""

    def values(self) -> dict[str, list[Any]]:
        """The values of each setting, by dotted key.

        Raises:
            ConfigError: a list is empty, or has a value twice.
        """
        listed = {key: value if isinstance(value, list) else [value] for key, value in flat(self.settings)}
        return {key: checked_values(key, values) for key, values in listed.items()}

    def to_toml(self) -> str:
        """The file; `read_asked` reads it."""
        top = self.model_dump(exclude={"settings"}, exclude_none=True)
        lines = [f"{key} = {to_toml(value)}" for key, value in top.items()]
        lines += ["", "[settings]", *(f"{to_toml(key)} = {to_toml(values)}" for key, values in self.values().items())]
        return HEAD + "\n".join(lines) + "\n"


def read_asked(path: Path) -> Asked:
    """Read a file of a sweep.

    Raises:
        ConfigError: it cannot be read, or a setting is wrong; one line per fault.
    """
    return validated(Asked, read_table(path), where=str(path))


def placements(asked: Asked, table: RawTable, where: str) -> list[tuple[int, ...]]:
    """The GPUs for each of the runs that can be live at a time; none where nothing was said of GPUs.

    Args:
        table: the settings of a run, as they were written.
        where: its file, for messages.

    Raises:
        ConfigError: the profile names no GPU, or more than there are.
    """
    if asked.gpus is None:
        return []
    size = len(_named_gpus(table))
    what = f"--gpus {','.join(map(str, asked.gpus))}"
    if len(set(asked.gpus)) < len(asked.gpus):
        raise ConfigError(f"{what}: a GPU is there twice; name each once")
    if not size:
        raise ConfigError(f"{what}: no service of {where} names a GPU; write gpus = [0] there, or leave it out")
    if size > len(asked.gpus):
        raise ConfigError(f"{what}: each run of {where} takes {size} GPUs; name at least as many")
    return [asked.gpus[first : first + size] for first in range(0, len(asked.gpus) - size + 1, size)]


def on_gpus(table: RawTable, gpus: Sequence[int]) -> list[str]:
    """The overrides by which a run takes these GPUs in place of those that its settings name, in their order."""
    others = dict(zip(_named_gpus(table), gpus, strict=True))
    return [
        f"services.{name}.gpus={[others[gpu] for gpu in service['gpus']]}"
        for name, service in table["services"].items()
        if isinstance(service, dict) and service.get("gpus")
    ]


def _named_gpus(table: RawTable) -> list[int]:
    services = table["services"].values()
    return sorted({gpu for each in services if isinstance(each, dict) for gpu in each.get("gpus") or ()})


def points(
    asked: Asked,
    table: RawTable,
    path: Path,
    chosen: Sequence[Mapping[str, Any]] | None = None,
    *,
    is_begun: bool = False,
) -> list[Point]:
    """The points of a sweep over a profile that was read from `path`.

    Args:
        chosen: the combinations that Optuna has chosen, where it chooses; None before it has begun.
        is_begun: its points were checked before, and only the first is again: 10,000 take a minute.

    Raises:
        ConfigError: a setting of any point is wrong; each fault once.
    """
    values = asked.values()
    seed_keys = [] if asked.seeds is None else _seed_keys(load_table(table, path))
    if asked.seeds is not None and not seed_keys:
        raise ConfigError(f"--seeds {asked.seeds}: no service of {path} has a seed")
    if twice := [key for key in seed_keys if key in values]:
        raise ConfigError(f"--seeds {asked.seeds} sets {', '.join(twice)}, which --set gives values too: keep one")
    if asked.optuna is None:
        if asked.sampler is not None:
            raise ConfigError(f"--sampler {asked.sampler}: only with --optuna N")
        found = points_of(values, num_random=asked.random, num_seeds=asked.seeds, seed_keys=seed_keys)
        _check(asked, found[:1] if is_begun else found, table, path)
        return found
    if asked.random is not None:
        raise ConfigError("--random and --optuna: keep one; --sampler random chooses at random")
    varied = [key for key, each in values.items() if len(each) > 1 or range_of(key, each) is not None]
    if not varied:
        raise ConfigError("--optuna: no setting has several values or a range, as in KEY=loguniform(1e-5,1e-3)")
    if chosen is None:
        _check(asked, points_at(enumerate(_extremes(values)), varied, seed_keys=seed_keys), table, path)
    if (num := max(asked.optuna, len(chosen or ())) * (asked.seeds or 1)) > MAX_POINTS:
        raise ConfigError(f"--optuna: {num} points are more than {MAX_POINTS}: ask for fewer combinations or seeds")
    return points_at(enumerate(chosen or ()), varied, num_seeds=asked.seeds, seed_keys=seed_keys)


def _check(asked: Asked, found: Sequence[Point], table: RawTable, path: Path) -> None:
    faults: dict[str, None] = {}
    for point in found:
        try:
            placements(asked, profile_at(point, table, path)().written, str(path))
        except ConfigError as error:
            faults |= dict.fromkeys(str(error).splitlines())
    if faults:
        raise ConfigError("\n".join(faults))


def _extremes(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations that have every listed value, and both ends of every range, at least once."""
    listed = {key: each if (of := range_of(key, each)) is None else of.ends for key, each in values.items()}
    longest = max(map(len, listed.values()), default=0)
    return [{key: each[min(place, len(each) - 1)] for key, each in listed.items()} for place in range(longest)]


def profile_at(point: Point, table: RawTable, path: Path, more: Sequence[str] = ()) -> partial[LoadedProfile]:
    """Loads the profile with the settings of a point, and more overrides on top."""
    return partial(load_table, table, path, (*point.overrides, *more))


def _seed_keys(loaded: LoadedProfile) -> Sequence[str]:
    """The seeds of all services: of batches, prompts and samples."""
    services: Mapping[str, Any] = loaded.profile.services
    return [f"services.{name}.seed" for name, service in services.items() if "seed" in type(service).model_fields]
