"""Alignment on made-up groups: what is measured is right, and each cause is distinguished by its sign."""

from __future__ import annotations

import json
import math
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
from alignment_fakes import completion, group, healthy_group, write_groups
from screen_fakes import metrics_line

from grpo_engine.diagnosis.alignment import diagnose_alignment
from grpo_engine.diagnosis.evidence import Evidence, RunSettings
from grpo_engine.diagnosis.finding import Certainty, Finding
from grpo_engine.diagnosis.token_differences import AlignmentNumbers, Part, alignment_numbers, group_tokens, quantile
from grpo_engine.train.config import TrainConfig
from grpo_engine.wire.metrics import MetricsLine, RolloutLine
from grpo_tui.run_files.metrics import MetricsTail
from grpo_tui.view.alignment.ratios import counts_between, ratios, round_up
from grpo_tui.view.alignment.reader import MAX_TOKENS, AlignmentReader
from grpo_tui.view.alignment.state import (
    AlignmentView,
    GroupsMeasured,
    Measured,
    NewestWanted,
    StepMoved,
    TokensScrolled,
    Window,
    WindowTurned,
    after,
    trained_version,
)
from grpo_tui.view.run_settings import read_settings, settings_of


def measured(*groups: RolloutLine, version: int | None = 0) -> AlignmentNumbers:
    numbers = alignment_numbers([group_tokens(one, version) for one in groups])
    assert numbers is not None
    return numbers


def found(
    *groups: RolloutLine, version: int | None = 0, began: float | None = None, **settings: Any
) -> tuple[Finding, ...]:
    known = Evidence(numbers=measured(*groups, version=version), settings=RunSettings(**settings), began=began)
    return diagnose_alignment(known)


# --- what is measured ------------------------------------------------------------------------------------------------


def test_a_difference_is_trainer_minus_inference_over_the_trained_tokens() -> None:
    numbers = measured(group(completion([-1.0, -2.0], [-1.1, -1.7]), completion([], [-1.0])))
    assert numbers.all == Part(num=2, mean=pytest.approx(-0.1), abs_mean=pytest.approx(0.2))
    assert list(numbers.differences) == pytest.approx([-0.3, 0.1])
    assert list(numbers.magnitudes) == pytest.approx([0.1, 0.3])
    assert numbers.num_untrained == 1


def test_tokens_without_a_number_are_counted_and_left_out() -> None:
    numbers = measured(group(completion([-1.0, math.nan, -2.0], [-1.0, -1.0, 1.0])))
    assert (numbers.all.num, numbers.num_without) == (1, 2)


def test_groups_without_both_logprobs_have_no_numbers() -> None:
    assert alignment_numbers([]) is None
    assert alignment_numbers([group_tokens(group(completion([], [-1.0])), 0)]) is None


def test_first_and_last_tokens_are_measured_apart_and_a_truncated_completion_has_no_last() -> None:
    numbers = measured(
        group(completion([-1.0, -1.0, -1.0], [-2.0, -1.0, -5.0]), completion([-1.0, -1.0], [-2.0, -8.0], is_cut=True))
    )
    assert numbers.firsts is not None
    assert numbers.firsts.mean == pytest.approx(1.0)
    assert numbers.ends == Part(num=1, mean=pytest.approx(4.0), abs_mean=pytest.approx(4.0))
    assert numbers.inner is not None
    assert numbers.inner.num == 2


def test_ages_count_versions_back_from_the_trained_one_and_later_ones_are_fresh() -> None:
    numbers = measured(group(completion([-1.0] * 4, [-1.0, -1.0, -1.5, -2.0], versions=[9, 7, 6, 5])), version=7)
    assert [(at.low, at.part.num) for at in numbers.by_age] == [(0, 2), (1, 1), (2, 1)]
    assert measured(group(completion([-1.0], [-1.0])), version=None).by_age == ()


def test_positions_share_buckets_where_completions_are_long() -> None:
    long = completion([-1.0] * 100, [-1.0] * 100)
    parts = measured(group(long)).by_position
    assert len(parts) <= 16
    assert (parts[0].low, parts[-1].high) == (0, 99)
    assert sum(at.part.num for at in parts) == 99  # the last token ends it


def test_worst_tokens_come_with_their_text_and_alike_ones_once() -> None:
    alike = completion([-1.0, -1.0, -1.0], [-1.0, -4.0, -1.0], texts=["The ", "cat", "."])
    worst = measured(group(alike, alike, completion([-1.0], [-1.5]), prompt="Name it: ")).worst
    assert (worst[0].text, worst[0].before, worst[0].after, worst[0].num) == ("cat", "Name it: The ", ".", 2)
    assert (worst[0].position, worst[0].length, worst[0].difference) == (1, 3, 3.0)


def test_a_file_without_texts_shows_ids() -> None:
    worst = measured(group(completion([-1.0, -1.0], [-4.0, -1.0]))).worst[0]
    assert (worst.text, worst.after) == ("#100", "#101")


def test_quantiles_bins_and_rounded_scales_by_hand() -> None:
    rising = [-2.0, -1.0, 0.0, 0.0, 1.0]
    assert counts_between(rising, [-2.0, -0.5, 0.5, 1.0]) == [2, 2, 1]
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.9, 1.0)] == [1.0, 2.0, 4.0, 4.0]
    assert [round_up(value) for value in (0.0, 0.0012, 0.16, 2.0, 8.0)] == pytest.approx([1, 0.0015, 0.2, 2, 10])


def test_ratios_are_counted_beside_the_clip_of_the_run() -> None:
    differences = sorted(math.log(ratio) for ratio in (0.5, 0.79, 0.81, 1.0, 1.27, 1.29))
    beside = ratios(differences, 0.2, 0.28)
    assert (beside.num_below, beside.num_above, beside.share_outside) == (2, 1, 0.5)
    assert beside.mean == pytest.approx((0.5 + 0.79 + 0.81 + 1.0 + 1.27 + 1.29) / 6)
    assert ratios(differences, 1.0, 1e3).share_outside == 0


def test_the_trained_version_is_the_one_that_the_step_before_made() -> None:
    lines = [metrics_line(step) for step in range(1, 6)]
    assert trained_version(3, lines) == 2
    assert trained_version(9, []) == 8
    resumed = [line.model_copy(update={"policy_version": line.step + 10}) for line in lines]
    assert trained_version(6, resumed) == 15
    silent = [metrics_line(step, rollout__staleness_mean=None) for step in range(1, 6)]
    assert trained_version(3, silent) is None


# --- what it means ---------------------------------------------------------------------------------------------------


def scaled(factor: float) -> RolloutLine:
    return healthy_group(change=lambda logprob, place: factor * logprob)


def shifted_at(place: int, by: float) -> RolloutLine:
    """A group that differs by `by` nats at one place of each completion; -1 is the last."""
    return healthy_group(change=lambda logprob, at: logprob + by if at == place else logprob)


def biased(by: float) -> RolloutLine:
    return healthy_group(noise=0.3, change=lambda logprob, place: logprob + by)


def by_version(noise_by_version: dict[int, float]) -> list[RolloutLine]:
    return [healthy_group(noise=noise, version=version, seed=version) for version, noise in noise_by_version.items()]


def growing() -> RolloutLine:
    """A group whose differences grow along the completion."""
    chance = random.Random(1)
    return healthy_group(change=lambda logprob, place: logprob + chance.gauss(0, max(0, place) * 0.02))


FEW_CONTRADICT = healthy_group(change=lambda logprob, at: -9.0 if at == 7 and logprob > -0.1 else logprob, num=40)
TOP_P = healthy_group(change=lambda logprob, place: logprob + math.log(0.7))
"""The trainer's log-probs where inference chose among tokens of 70% together."""
NO_LOGPROBS = group(*[completion([-1.0, -1.0], [1.0, -1.0]) for _ in range(20)])
AT_07: dict[str, Any] = {"temperatures": (0.7,), "logprobs_mode": "processed"}
RAW_AT_07: dict[str, Any] = {"temperatures": (0.7,), "logprobs_mode": "raw"}
TOP_P_07: dict[str, Any] = {"top_ps": (0.7,), "logprobs_mode": "processed"}
HEALTHY_SINCE_ADAPTER: dict[str, Any] = {"began": 0.001, "bridge_mode": "lora_only"}
OLDER_ALONE = [healthy_group(noise=1e-5, version=6), healthy_group(noise=0.1, version=5)]
SURE, LIKELY, POSSIBLE = Certainty.SURE, Certainty.LIKELY, Certainty.POSSIBLE


@pytest.mark.parametrize(
    ("groups", "known", "cause", "certainty", "words"),
    [
        ([healthy_group(noise=1e-6)], {}, "healthy", SURE, ["equal to the last digits"]),
        ([healthy_group(noise=0.02)], {}, "healthy", SURE, ["the noise of bfloat16"]),
        ([healthy_group(noise=0.0005)], {"dtypes": ("float32",)}, "healthy", SURE, ["the noise of float32"]),
        ([healthy_group(noise=0.02)], {"dtypes": ("float32",)}, "healthy", SURE, ["healthy: < 0.1"]),
        (OLDER_ALONE, {"version": 6, "began": 1e-6}, "healthy", SURE, ["age"]),
        ([scaled(0.7)], AT_07, "temperature", SURE, ["0.70 times", "--temperature 1", "--logprobs-mode raw"]),
        ([scaled(1.4)], AT_07, "temperature", SURE, ["1.40 times", "--temperature 1", "--logprobs-mode raw"]),
        ([scaled(0.7)], {}, "temperature", LIKELY, []),
        ([scaled(0.7)], {"temperatures": (1.0,)}, "temperature", POSSIBLE, []),
        ([scaled(0.7)], RAW_AT_07, "temperature", SURE, ["--logprobs-mode processed"]),
        ([healthy_group(shift=1)], {}, "shifted", SURE, ["the next token"]),
        ([healthy_group(shift=-1)], {}, "shifted", SURE, ["the token before"]),
        ([shifted_at(-1, -3)], {}, "end-token", SURE, ["the trainer finds it less likely", "--stop"]),
        ([shifted_at(0, -3)], {}, "joint", LIKELY, ["--chat-template"]),
        ([FEW_CONTRADICT], {}, "retokenised", LIKELY, ["token ids"]),
        ([FEW_CONTRADICT], {"model": "Qwen/Qwen3-30B-A3B"}, "routing", LIKELY, ["--correction truncate"]),
        ([TOP_P], TOP_P_07, "cut-vocabulary", SURE, ["--top-p 1"]),
        ([TOP_P], {}, "cut-vocabulary", POSSIBLE, []),
        ([growing()], {}, "position", LIKELY, ["rope_scaling"]),
        (by_version({9: 0.001, 8: 0.2, 6: 0.5}), {"version": 9}, "stale", SURE, ["--max-staleness"]),
        (by_version({0: 0.5}), {"version": 40}, "stale", LIKELY, ["inference has old weights", "--weight-bridge-mode"]),
        ([biased(-0.15)], HEALTHY_SINCE_ADAPTER, "lora", LIKELY, ["--enable-lora"]),
        ([biased(-0.15)], {"began": 0.001, "bridge_mode": "shared_vllm"}, "not-arriving", LIKELY, []),
        ([biased(-0.02)], {**HEALTHY_SINCE_ADAPTER, "version": 1}, "stale", POSSIBLE, []),
        (
            [healthy_group(noise=0.5)],
            {"dtypes": ("bfloat16", "float16")},
            "weights",
            POSSIBLE,
            ["bfloat16 and float16", "--model-name"],
        ),
        ([NO_LOGPROBS], {}, "missing", SURE, []),
    ],
)
def test_a_cause_is_found_by_its_sign_and_is_as_certain_as_the_settings_make_it(
    groups: list[RolloutLine], known: dict[str, Any], cause: str, certainty: Certainty, words: list[str]
) -> None:
    finding = found(*groups, **known)[0]
    assert (finding.id, finding.certainty) == (cause, certainty)
    said = f"{finding.text} {finding.cause} {finding.hint}"
    assert [each for each in words if each not in said] == []
    assert (finding.hint is None) == (cause == "healthy")


def test_a_slight_scaling_of_old_tokens_and_noise_are_no_temperature_and_a_wide_one_is_only_possible() -> None:
    for not_scaled in (found(scaled(1.15), version=2), found(healthy_group(noise=0.8))):
        assert "temperature" not in {finding.id for finding in not_scaled}
    doubted = next(finding for finding in found(scaled(1.4), version=2) if finding.id == "temperature")
    assert doubted.certainty is Certainty.POSSIBLE


def test_fresh_tokens_of_the_first_steps_alone_do_not_make_the_later_ones_stale() -> None:
    later = [biased(-0.6).model_copy(update={"step": step}) for step in range(2, 8)]
    numbers = alignment_numbers([group_tokens(healthy_group(), 0), *(group_tokens(one, 1) for one in later)])
    assert numbers is not None
    known = Evidence(numbers=numbers, settings=RunSettings(bridge_mode="lora_only"), began=0.001)
    assert diagnose_alignment(known)[0].id == "lora"


def test_the_surest_cause_comes_first() -> None:
    findings = found(biased(-0.6), version=1, **HEALTHY_SINCE_ADAPTER)
    assert [(finding.id, finding.certainty) for finding in findings] == [("lora", LIKELY), ("stale", POSSIBLE)]


# --- which steps -----------------------------------------------------------------------------------------------------


def view_of_30_steps() -> AlignmentView:
    measured = Measured(numbers=None, newest_step=30)
    return after(AlignmentView(), GroupsMeasured(measured=measured, settings=RunSettings()))


def test_the_window_turns_and_moves_and_ends_at_the_newest_again() -> None:
    view = view_of_30_steps()
    assert [after(view, WindowTurned()).window, view.window] == [Window.ONE, Window.LAST]
    back = after(view, StepMoved(by=-4))
    assert back.until_step == 26
    assert after(back, StepMoved(by=-100)).until_step == 1
    assert after(back, StepMoved(by=4)).until_step is None
    assert after(back, NewestWanted()).until_step is None
    assert after(AlignmentView(), StepMoved(by=-1)).until_step is None


def test_scrolling_stays_within_the_worst_tokens() -> None:
    numbers = measured(group(completion([-1.0, -2.0, -3.0], [-1.5, -2.6, -3.7])))
    view = after(view_of_30_steps(), GroupsMeasured(measured=Measured(numbers=numbers), settings=RunSettings()))
    assert after(view, TokensScrolled(by=99)).first_token == 2
    assert after(view, TokensScrolled(by=-1)).first_token == 0


def lines(num: int) -> list[MetricsLine]:
    return [metrics_line(step) for step in range(1, num + 1)]


def look(reader: AlignmentReader, *args: Any, **kwargs: Any) -> tuple[Measured, AlignmentNumbers]:
    """What the reader measures, which it has to."""
    seen = reader.look(*args, **kwargs)
    assert seen is not None
    assert seen.numbers is not None
    return seen, seen.numbers


def test_the_reader_measures_the_window_once_until_something_changes(tmp_path: Path) -> None:
    write_groups(tmp_path, [healthy_group(step=step, version=step - 1) for step in range(1, 31)])
    reader = AlignmentReader(tmp_path)
    last, numbers = look(reader, Window.LAST, None, lines(30))
    assert (numbers.first_step, numbers.last_step, last.newest_step) == (21, 30, 30)
    assert reader.look(Window.LAST, None, lines(30)) is None
    _, numbers = look(reader, Window.ONE, 7, lines(30))
    assert (numbers.first_step, numbers.last_step) == (7, 7)
    write_groups(tmp_path, [healthy_group(step=31, version=30)])
    assert look(reader, Window.ONE, None, lines(30))[0].newest_step == 31


def test_groups_after_the_chosen_moment_do_not_count_and_a_step_without_groups_shows_the_one_before(
    tmp_path: Path,
) -> None:
    write_groups(tmp_path, [healthy_group(step=step) for step in (1, 3, 4, 5, 9)])
    until = healthy_group(step=4).time
    assert look(AlignmentReader(tmp_path), Window.ALL, None, (), until_time=until)[0].newest_step == 4
    assert look(AlignmentReader(tmp_path), Window.ONE, 7, ())[1].last_step == 5


@pytest.mark.slow
def test_a_long_run_is_sampled_evenly_and_within_bounds(tmp_path: Path) -> None:
    big = healthy_group(num=100, length=50)
    write_groups(tmp_path, [big.model_copy(update={"step": step}) for step in range(1, 41)])
    seen, numbers = look(AlignmentReader(tmp_path), Window.ALL, None, ())
    assert seen.num_groups_known == 40
    assert 1 < numbers.num_groups < 40
    assert numbers.all.num <= 2 * MAX_TOKENS
    assert numbers.last_step == 40


@pytest.mark.parametrize(
    ("groups", "reason"),
    [([], "no rollouts.jsonl yet"), ([group(completion([], [-1.0]))], "no log-probs")],
)
def test_without_recorded_logprobs_the_reason_is_given(tmp_path: Path, groups: list[RolloutLine], reason: str) -> None:
    write_groups(tmp_path, groups)
    seen = AlignmentReader(tmp_path).look(Window.LAST, None, ())
    assert seen is not None
    assert reason in seen.why_none


# --- what the run was started with -----------------------------------------------------------------------------------


def profile(**trainer: Any) -> dict[str, Any]:
    return {
        "model": {"name": "local/tiny"},
        "bridge": {"mode": "lora_only"},
        "services": {
            "t": {"kind": "trainer", "dtype": "float32", **trainer},
            "s": {"kind": "inference", "dtype": "bfloat16", "logprobs_mode": "processed"},
            "e": {"kind": "environment", "temperature": 0.7, "top_p": 0.9},
        },
    }


@pytest.mark.parametrize(
    ("trainer", "band"),
    [
        ({}, (0.2, 0.2)),
        ({"clip_eps": 0.1}, (0.1, 0.1)),
        ({"clip_eps": 0.1, "clip_high": 0.3}, (0.1, 0.3)),
        ({"loss": "dapo", "clip_eps": 0.1}, (0.2, 0.28)),
        ({"loss": "gspo"}, (3e-4, 4e-4)),
        ({"loss": "one of next year"}, (0.2, 0.2)),
    ],
)
def test_the_clip_is_that_of_the_run(trainer: dict[str, Any], band: tuple[float, float]) -> None:
    settings = settings_of(profile(**trainer))
    assert (settings.clip_low, settings.clip_high) == pytest.approx(band)
    assert settings.is_clip_known
    assert settings.clips_sequences is (trainer.get("loss") == "gspo")


def test_settings_that_both_sides_must_share_are_read() -> None:
    settings = settings_of(profile())
    assert (settings.temperatures, settings.top_ps, settings.logprobs_mode) == ((0.7,), (0.9,), "processed")
    assert settings.dtypes == ("float32", "bfloat16")
    assert settings.trains_adapter


@pytest.mark.parametrize("text", [None, "{", "[]", '{"services": 3}', '{"services": {"a": {"kind": "command"}}}'])
def test_a_run_without_settings_has_the_default_clip(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "resolved.json").write_text(text)
    settings = read_settings(tmp_path)
    assert (settings.clip_low, settings.clip_high, settings.is_clip_known) == (0.2, 0.2, False)


def test_the_clip_follows_the_trainers_own_settings(tmp_path: Path) -> None:
    written = json.loads(TrainConfig(model_name="local/tiny", loss="dapo").model_dump_json())
    (tmp_path / "resolved.json").write_text(json.dumps({"services": {"t": {**written, "kind": "trainer"}}}))
    assert read_settings(tmp_path).clip_high == pytest.approx(0.28)


# --- recorded runs ---------------------------------------------------------------------------------------------------

RECORDED = Path(__file__).parents[1] / "recorded" / "alignment" / "runs.tar.gz"
"""The last ten steps of six runs of tiny-cpu, each started with the fault that it is named for: a temperature of 0.7
in the environment alone, top_p 0.7, eight batches ahead at a high rate, log-probabilities posted a token late, a server
that ignored its adapter; and one without a fault."""


@pytest.mark.parametrize("fault", ["healthy", "temperature", "cut-vocabulary", "stale", "shifted", "lora"])
@pytest.mark.parametrize("window", [Window.LAST, Window.ALL])
def test_the_fault_of_a_recorded_run_is_named_first(tmp_path: Path, fault: str, window: Window) -> None:
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    run_folder = tmp_path / fault
    seen, _ = look(AlignmentReader(run_folder), window, None, MetricsTail(run_folder / "metrics.jsonl").read().lines)
    assert seen.findings[0].id == fault
    assert seen.findings[0].certainty is not Certainty.POSSIBLE
