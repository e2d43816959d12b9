"""Optuna chooses the settings of a sweep's next point by what the earlier ones came to (extra `sweeps`).

Its study is `optuna.db` in the folder of the sweep: a trial is a combination of settings, its value the score or reward
of the runs. `chosen.json` repeats what was chosen, so that the table of a sweep is read without Optuna. Only the holder
of the sweep's lock asks and tells.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_engine.config import toml_value
from grpo_engine.errors import ConfigError
from grpo_engine.wire.codec import require_own_journal
from grpo_tui.sweeps.grid import to_toml

STUDY_FILE = "optuna.db"
STUDY = "sweep"
NUM_RANDOM = 8
"""Combinations before the sampler begins to model what is good."""
_RANGE = re.compile(r"(uniform|loguniform|integers)\(\s*([^,()\s]+)\s*,\s*([^,()\s]+)\s*\)")
Sampler = Literal["tpe", "random"]
Outcome = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The values of a setting as a range, both ends included: `loguniform(1e-5,1e-3)`."""

    kind: str
    low: float
    high: float

    def nearest(self, value: float) -> float | int:
        """A value of the range with four digits, as people write them."""
        if self.kind == "integers":
            return int(value)
        return min(max(float(f"{value:.4g}"), self.low), self.high)

    @property
    def ends(self) -> tuple[float | int, float | int]:
        """The least and the greatest value."""
        return self.nearest(self.low), self.nearest(self.high)


def range_of(key: str, values: Sequence[Any]) -> Range | None:
    """The range that the one value of a setting stands for; None where it is no range.

    Raises:
        ConfigError: its ends are not numbers in rising order.
    """
    found = _RANGE.fullmatch(values[0]) if len(values) == 1 and isinstance(values[0], str) else None
    if found is None:
        return None
    kind, *ends = found.groups()
    try:
        low, high = (float(int(end)) if kind == "integers" else float(end) for end in ends)
    except (ValueError, OverflowError):  # the latter beyond any float
        numbers = "whole numbers" if kind == "integers" else "numbers"
        raise ConfigError(f"{key}: {values[0]}: expected two {numbers}") from None
    if not (low < high and abs(low) + abs(high) < float("inf")) or (kind == "loguniform" and low <= 0):
        needs = "0 < low < high" if kind == "loguniform" else "low < high"
        raise ConfigError(f"{key}: {values[0]}: expected {needs}")
    return Range(kind=kind, low=low, high=high)


def require_optuna() -> None:
    """Refuse to choose without the package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise ConfigError("--optuna needs the package optuna: pip install 'grpo-tui[sweeps]'") from None


class Chooser:
    """The study of a sweep."""

    def __init__(self, folder: Path, settings: Mapping[str, Sequence[Any]], sampler: Sampler | None) -> None:
        """Open the study, or begin it.

        Raises:
            ConfigError: Optuna is not installed, or the study is a link, or names another file.
        """
        require_optuna()
        if (folder / STUDY_FILE).is_symlink():
            raise ConfigError(f"{folder / STUDY_FILE}: is a link, and another database would be written: remove it")
        try:
            require_own_journal(folder / STUDY_FILE)
        except OSError as error:
            raise ConfigError(f"{folder / STUDY_FILE}: {error}: remove it and its journal") from None
        import optuna
        from sqlalchemy.engine import URL

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._settings = settings
        self._states = optuna.trial.TrialState
        url = URL.create("sqlite", database=str(folder / STUDY_FILE)).render_as_string()
        samplers = optuna.samplers
        self._study = optuna.create_study(
            storage=optuna.storages.RDBStorage(url),
            study_name=STUDY,
            load_if_exists=True,
            direction="maximize",
            sampler=samplers.RandomSampler()
            if sampler == "random"
            else samplers.TPESampler(n_startup_trials=NUM_RANDOM, constant_liar=True),
        )

    def chosen(self) -> list[dict[str, Any]]:
        """The settings of each combination that was chosen, in order."""
        return [self._values(trial.params) for trial in self._study.get_trials(deepcopy=False)]

    def ask(self) -> dict[str, Any]:
        """Choose the settings of another combination.

        Raises:
            OSError: the disk is full, or the study cannot be written.
        """
        with _disk_errors():
            return self._values(self._study.ask(self._distributions()).params)

    def tell(self, number: int, outcome: Outcome, value: float | None) -> None:
        """Record what a combination came to; again changes nothing.

        Raises:
            OSError: as of `ask`.
        """
        state = self._states.FAIL if outcome == "failed" else self._states.PRUNED
        if outcome == "complete":
            state = self._states.COMPLETE
        with _disk_errors():
            self._study.tell(number, value if outcome == "complete" else None, state=state, skip_if_finished=True)

    def _distributions(self) -> dict[str, Any]:
        import optuna

        kinds = optuna.distributions
        found: dict[str, Any] = {}
        for key, values in self._settings.items():
            match range_of(key, values):
                case None if len(values) > 1:
                    found[key] = kinds.CategoricalDistribution([to_toml(value) for value in values])
                case Range(kind="integers", low=low, high=high):
                    found[key] = kinds.IntDistribution(int(low), int(high))
                case Range(kind=kind, low=low, high=high):
                    found[key] = kinds.FloatDistribution(low, high, log=kind == "loguniform")
        return found

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, given in self._settings.items():
            if key not in params:
                values[key] = given[0]
            elif (between := range_of(key, given)) is not None:
                values[key] = between.nearest(params[key])
            else:
                values[key] = toml_value(params[key])
        return values


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Errors of the database as those of its file."""
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except StorageInternalError as error:
        cause = error.__cause__ or error
        raise OSError(errno.EIO, f"{STUDY_FILE} cannot be written: {str(cause).partition(chr(10))[0]}") from error
