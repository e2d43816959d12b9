"""The points of a sweep, and the table over its seeds."""

from __future__ import annotations

import errno
import re
import sys
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.config import read_table, validated
from grpo_engine.errors import ConfigError
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import METRICS_FILE
from grpo_tui.sweeps import runner
from grpo_tui.sweeps.asked import Asked, on_gpus, placements, points, read_asked
from grpo_tui.sweeps.chooser import Chooser, Range, range_of, require_optuna
from grpo_tui.sweeps.folder import PointRun, PointState, begin, read_mark
from grpo_tui.sweeps.grid import points_of, to_toml, values_of
from grpo_tui.sweeps.halving import AtRung, Halving, climbed, verdicts
from grpo_tui.sweeps.results import PointResult, by_settings, to_csv


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("a.lr=1e-4,1e-5", [1e-4, 1e-5]),
        ("a.gpus=[0, 1],[2, 3]", [[0, 1], [2, 3]]),
        ("a.task={ name = 'x', n = 1 },sort6", [{"name": "x", "n": 1}, "sort6"]),
        ('a.text="x,y",z', ["x,y", "z"]),
        ("a.on=true,false", [True, False]),
        ("a.name=x", ["x"]),
    ],
)
def test_commas_separate_values_but_not_within_brackets_or_quotes(override: str, values: list[Any]) -> None:
    assert values_of(override) == (override.partition("=")[0], values)


@pytest.mark.parametrize("override", ["a.lr", "=1", "a.lr=1,,2", "a.lr=1e-4,0.0001"])
def test_a_value_that_is_missing_or_there_twice_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        values_of(override)


def test_points_are_every_combination_with_every_seed_and_are_the_same_again() -> None:
    settings = {"a": [1, 2], "b": ["x"], "c": [True, False]}
    points = points_of(settings, num_seeds=2, seed_keys=["s.seed", "t.seed"])
    assert [(each.number, dict(each.settings), each.seed) for each in points[:3]] == [
        (1, {"a": 1, "c": True}, 0),
        (2, {"a": 1, "c": True}, 1),
        (3, {"a": 1, "c": False}, 0),
    ]
    assert len(points) == 8
    assert points[0].overrides == ("a=1", 'b="x"', "c=true", "s.seed=0", "t.seed=0")
    wide = {name: list(range(100)) for name in "abcdef"}
    some = points_of(wide, num_random=5)
    assert len({each.overrides for each in some}) == 5
    assert some == points_of(wide, num_random=5)
    with pytest.raises(ConfigError, match="--random"):
        points_of(wide)


def test_what_was_asked_is_read_back_from_its_file(tmp_path: Any) -> None:
    values = {"services.trainer.lr": [1e-4, 1e-5], "e": [[1, 2]], "t": [{"name": 'a "b"\n', "n": 1.5}], "u": ["ü"]}
    asked = Asked(profile="p", settings=values, seeds=3, jobs=2, halving=Halving(min_steps=5))
    (tmp_path / "sweep.toml").write_text(asked.to_toml())
    assert read_asked(tmp_path / "sweep.toml").values() == values
    assert read_asked(tmp_path / "sweep.toml").halving == Halving(eta=3, min_steps=5)
    (tmp_path / "by-hand.toml").write_text('profile = "p"\n[settings.services.trainer]\nlr = [1, 2]\nloss = "dapo"\n')
    by_hand = read_asked(tmp_path / "by-hand.toml")
    assert by_hand.values() == {"services.trainer.lr": [1, 2], "services.trainer.loss": ["dapo"]}
    assert to_toml(1e-05) == "1e-05"


def test_the_table_has_the_best_settings_first_with_the_standard_error_over_seeds() -> None:
    def result(number: int, lr: float, score: float | None, state: str = "finished") -> PointResult:
        error = None if score is None else 0.05
        values: dict[str, Any] = {"point": number, "settings": {"lr": lr}, "seed": 0, "state": state, "hours": 0.5}
        return PointResult(**values, score=score, score_error=error, reward=score, run=f"r{number}", tokens=10)

    points = [
        result(1, 1e-4, 0.5),
        result(2, 1e-4, 0.7),
        result(3, 1e-5, 0.8),
        result(4, 1e-5, 0.1, "failed"),
        result(5, 1.0, None, "failed"),
    ]
    best, second, last = by_settings(points)
    assert (best.settings, best.score, best.score_error, best.error_over) == ({"lr": 1e-5}, 0.8, 0.05, "prompts")
    assert (best.num_finished, best.num_runs, best.tokens, best.hours) == (1, 2, 20, 1.0)
    assert (second.score, second.error_over) == (pytest.approx(0.6), "seeds")
    assert second.score_error == pytest.approx(0.1414213562 / sqrt(2))  # the deviation of 0.5 and 0.7
    assert last.score is None
    head, *rows = to_csv(points).splitlines()
    assert head.startswith("point,lr,seed,state,run")
    assert rows[0].startswith("1,0.0001,0,finished,r1")


# --- successive halving ----------------------------------------------------------------------------------------------


def at(**times: float) -> dict[int, AtRung]:
    """`s20=0.5` is a reward of 0.5 at step 20, reached after 20 seconds."""
    return {int(name[1:]): AtRung(time=float(name[1:]), reward=reward) for name, reward in times.items()}


def later(run: dict[int, AtRung], seconds: float) -> dict[int, AtRung]:
    return {rung: AtRung(time=each.time + seconds, reward=each.reward) for rung, each in run.items()}


def test_rungs_are_eta_times_as_far_as_the_one_before() -> None:
    assert Halving(eta=3, min_steps=20).rungs(540) == [20, 60, 180, 540]
    assert Halving(eta=2.5, min_steps=10).rungs(70) == [10, 25, 62]
    assert Halving().rungs(19) == []
    with pytest.raises(ConfigError, match=r"halving\.min_step: unknown setting"):
        validated(Asked, {"profile": "p", "halving": {"min_step": 3}}, where="")


def test_settings_are_hopeless_unless_they_are_among_the_best_of_those_that_came_to_the_rung_before_them() -> None:
    first, better, worse = at(s20=0.5), later(at(s20=0.6), 1), later(at(s20=0.55), 2)
    assert verdicts([("a", first)], 3) == {}, "there is nothing to compare it with"
    assert verdicts([("a", first), ("b", better)], 3) == {}, "what came first was the best then"
    why = "reward 0.550 at step 20 was number 2 of 3 there, of which the best one goes on"
    assert verdicts([("a", first), ("b", better), ("c", worse)], 3) == {"c": why}
    assert verdicts([("c", worse), ("b", better), ("a", first)], 3) == {"c": why}, "the order of the points is none"
    assert verdicts([("a", first), ("b", later(at(s20=0.5), 1))], 3) == {}, "equal is not worse"
    rising = [("a", later(at(s20=0.4), -9)), ("b", first), ("c", worse)]
    assert verdicts([*rising, ("d", later(at(s20=0.52), 3))], 2) == {}, "of four the best two go on"
    assert list(verdicts([*rising, ("d", later(at(s20=0.45), 3))], 2)) == ["d"]


def test_a_run_is_judged_at_each_rung_and_its_seeds_together() -> None:
    steady, falling = at(s20=0.5, s60=0.8), later(at(s20=0.6, s60=0.7), 5)
    assert "at step 60" in verdicts([("a", steady), ("b", falling)], 3)["b"]
    lucky, unlucky = later(at(s20=0.9), 5), later(at(s20=0.3), 6)
    assert verdicts([("a", at(s20=0.5)), ("b", lucky), ("b", unlucky)], 3) == {}, "0.6 in the mean"
    assert list(verdicts([("a", at(s20=0.7)), ("b", lucky), ("b", unlucky)], 3)) == ["b"]


def test_a_run_is_at_a_rung_with_the_mean_of_its_rewards_up_to_it() -> None:
    def line(step: int, **metrics: float) -> MetricsLine:
        return MetricsLine(time=100.0 + step, step=step, policy_version=step, metrics=metrics)

    lines = [line(step, **{"reward/mean": step / 100}) for step in range(5, 65, 5)]
    found = climbed(lines, Halving(eta=2, min_steps=12))
    assert found[12] == AtRung(time=115.0, reward=pytest.approx(0.075))  # of the steps 5 and 10
    assert found[24].reward == pytest.approx(0.125)
    assert found[48] == AtRung(time=150.0, reward=pytest.approx(0.25))  # of nine steps
    assert climbed([line(30, loss=1.0)], Halving()) == {}
    assert climbed([], Halving()) == {}


def test_the_gpus_of_a_sweep_are_divided_among_its_runs_in_place_of_those_of_the_profile() -> None:
    table = {"services": {"api": {}, "vllm": {"gpus": [1]}, "trainer": {"gpus": [2, 1]}, "judge": {"gpus": []}}}
    asked = Asked(profile="p", gpus=(0, 3, 4, 5, 7))
    assert placements(asked, table, "p.toml") == [(0, 3), (4, 5)]
    assert on_gpus(table, (4, 5)) == ["services.vllm.gpus=[4]", "services.trainer.gpus=[5, 4]"]
    assert placements(Asked(profile="p"), table, "p.toml") == []
    for gpus, fault in (((0,), "each run of p.toml takes 2 GPUs"), ((0, 0), "a GPU is there twice")):
        with pytest.raises(ConfigError, match=fault):
            placements(Asked(profile="p", gpus=gpus), table, "p.toml")
    with pytest.raises(ConfigError, match=r"no service of p\.toml names a GPU"):
        placements(asked, {"services": {"api": {}}}, "p.toml")


def test_on_a_full_disk_a_hopeless_point_is_ended_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[services.t]\nkind = "command"\nargv = ["true"]\n')
    rule = Halving(eta=2, min_steps=1)
    asked = Asked(profile=str(path), settings={"services.t.env.V": ["x", "y"]}, halving=rule)
    sweep = begin(asked, "s", tmp_path / "logs")
    states = (PointState.FINISHED, PointState.RUNNING)
    folders = [tmp_path / name for name in ("first", "second")]
    for time, (folder, reward) in enumerate(zip(folders, (0.5, 0.2), strict=True)):
        folder.mkdir()
        measured = MetricsLine(time=time, step=1, policy_version=1, metrics={"reward/mean": reward})
        (folder / METRICS_FILE).write_text(measured.model_dump_json() + "\n")
    said: list[str] = []
    sent: list[str] = []

    class Supervisor:
        async def command(self, do: str) -> None:
            sent.append(do)

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runner, "daemon_of", lambda _: Supervisor())
    sweeper = runner.Sweeper(sweep, said.append)
    runs = zip(sweep.points, states, folders, strict=True)
    sweeper._runs = {point.number: PointRun(point=point, state=state, folder=at) for point, state, at in runs}
    sweeper._to_do = []
    with monkeypatch.context() as full:
        full.setattr(runner, "write_mark", fails)
        sweeper._end_hopeless(rule)
    assert (said[-1].partition(":")[0], sent) == ("[2/2] services.t.env.V=y is not ended early", [])
    sweeper._end_hopeless(rule)
    sweeper._end_hopeless(rule)
    assert sent == ["down"]
    mark = read_mark(folders[1])
    assert mark is not None
    assert mark.pruned == "reward 0.200 at step 1 was number 2 of 2 there, of which the best one goes on"


# --- Optuna ----------------------------------------------------------------------------------------------------------


def test_a_range_is_a_value_with_two_ends_in_rising_order() -> None:
    between = range_of("lr", ["loguniform(1e-5, 1e-3)"])
    assert between == Range(kind="loguniform", low=1e-5, high=1e-3)
    assert [between.nearest(2.34567e-4), between.nearest(9.99999e-6)] == [2.346e-4, 1e-5]
    assert range_of("n", ["integers(1,8)"]).ends == (1, 8)  # type: ignore[union-attr]
    assert range_of("n", ["integers(1,8)", "x"]) is None
    assert range_of("n", [0.5]) is None
    beyond = f"integers(1,{'9' * 400})"  # what any float holds
    for wrong in ("loguniform(0,1)", "uniform(2,1)", "uniform(a,b)", "integers(1,2.5)", "uniform(0,inf)", beyond):
        with pytest.raises(ConfigError, match=r"n: .* expected"):
            range_of("n", [wrong])


def test_both_ends_of_a_range_and_every_value_are_checked_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[services.t]\nkind = "trainer"\n[model]\nname = "local/tiny"\n')
    table = read_table(path)

    def faults(**settings: Any) -> str:
        asked = Asked(profile="p", optuna=5, settings={f"services.t.{key}": value for key, value in settings.items()})
        with pytest.raises(ConfigError) as refused:
            points(asked, table, path)
        return str(refused.value)

    assert "services.t.lr" in faults(lr="uniform(-1,0.5)", loss=["grpo", "dapo"])
    assert "dabo" in faults(lr="uniform(1e-4,0.5)", loss=["grpo", "dapo", "dabo"])
    assert "no setting has several values or a range" in faults(lr=1e-4)
    asked = Asked(profile="p", optuna=5, settings={"services.t.lr": "loguniform(1e-5,1e-3)"})
    assert points(asked, table, path) == [], "Optuna has chosen none yet"
    chosen = [{"services.t.lr": 2e-4}, {"services.t.lr": 3e-5}]
    assert [each.label for each in points(asked, table, path, chosen)] == [
        "services.t.lr=0.0002",
        "services.t.lr=3e-05",
    ]


def test_without_optuna_a_sweep_that_needs_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'grpo-tui[sweeps]'")):
        require_optuna()


@pytest.mark.extended("which points Optuna may choose is checked before anything starts")
def test_the_study_of_a_sweep_goes_on_from_its_folder(tmp_path: Path) -> None:
    settings = {"a.lr": ["loguniform(1e-5,1e-3)"], "a.loss": ["grpo", [1, 2]], "a.n": [4]}
    study = Chooser(tmp_path, settings, "tpe")
    asked = [study.ask() for _ in range(3)]
    assert all(1e-5 <= each["a.lr"] <= 1e-3 and each["a.loss"] in ("grpo", [1, 2]) for each in asked)
    assert [each["a.n"] for each in asked] == [4, 4, 4]
    study.tell(0, "complete", 0.5)
    study.tell(1, "pruned", 0.1)
    study.tell(2, "failed", None)
    study.tell(0, "complete", 0.7)  # once more, after a kill
    again = Chooser(tmp_path, settings, "tpe")
    assert again.chosen() == asked
    again.ask()
    trials = again._study.get_trials()
    assert [(trial.state.name, trial.value) for trial in trials] == [
        ("COMPLETE", 0.5),
        ("PRUNED", None),
        ("FAIL", None),
        ("RUNNING", None),
    ]
