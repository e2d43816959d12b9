"""Alignment on made-up groups: what is measured is right, and each cause is told from the others by its sign."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import random
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from alignment_fakes import completion, group, healthy_group, write_groups
from screen_fakes import metrics_line

from grpo_engine.diagnosis import alignment, alignment_rules
from grpo_engine.diagnosis.alignment import diagnose_alignment
from grpo_engine.diagnosis.evidence import Evidence, RunSettings
from grpo_engine.diagnosis.finding import Certainty, Finding
from grpo_engine.diagnosis.token_differences import AlignmentNumbers, Part, alignment_numbers, group_tokens, quantile
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.flags import add_flags
from grpo_engine.server.config import ServerConfig
from grpo_engine.train.config import TrainConfig
from grpo_engine.wire.metrics import MetricsLine, RolloutLine
from grpo_tui.run_files.metrics import MetricsTail
from grpo_tui.view.alignment.ratios import counts_between, ratios, round_up
from grpo_tui.view.alignment.reader import MAX_TOKENS, AlignmentReader
from grpo_tui.view.alignment.run_settings import read_settings, settings_of
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


def measured(*groups: RolloutLine, version: int | None = 0) -> AlignmentNumbers:
    numbers = alignment_numbers([group_tokens(one, version) for one in groups])
    assert numbers is not None
    return numbers


def found(
    *groups: RolloutLine, version: int | None = 0, began: float | None = None, **settings: Any
) -> tuple[Finding, ...]:
    known = Evidence(numbers=measured(*groups, version=version), settings=RunSettings(**settings), began=began)
    return diagnose_alignment(known)


def first(*groups: RolloutLine, **known: Any) -> Finding:
    return found(*groups, **known)[0]


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


def test_groups_without_both_logprobs_say_nothing() -> None:
    assert alignment_numbers([]) is None
    assert alignment_numbers([group_tokens(group(completion([], [-1.0])), 0)]) is None


def test_first_and_last_tokens_are_told_apart_and_a_cut_completion_has_no_last() -> None:
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


def test_quantiles_bins_and_scales_are_what_they_say() -> None:
    rising = [-2.0, -1.0, 0.0, 0.0, 1.0]
    assert counts_between(rising, [-2.0, -0.5, 0.5, 1.0]) == [2, 2, 1]
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.9, 1.0)] == [1.0, 2.0, 4.0, 4.0]
    assert [round_up(value) for value in (0.0, 0.0012, 0.16, 2.0, 8.0)] == pytest.approx([1, 0.0015, 0.2, 2, 10])


def test_ratios_are_counted_beside_the_clip_of_the_run() -> None:
    differences = sorted(math.log(ratio) for ratio in (0.5, 0.79, 0.81, 1.0, 1.27, 1.29))
    told = ratios(differences, 0.2, 0.28)
    assert (told.num_below, told.num_above, told.share_outside) == (2, 1, 0.5)
    assert told.mean == pytest.approx((0.5 + 0.79 + 0.81 + 1.0 + 1.27 + 1.29) / 6)
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


def test_equal_logprobs_are_healthy_in_words() -> None:
    finding = first(healthy_group(noise=1e-6))
    assert (finding.id, finding.severity, finding.certainty) == ("healthy", "ok", Certainty.SURE)
    assert "equal to the last digits" in finding.text
    assert finding.hint is None


def test_small_symmetric_noise_is_named_as_that_of_bf16() -> None:
    assert "bf16" in first(healthy_group(noise=0.02)).text


def test_differences_of_older_tokens_alone_are_their_age_and_healthy() -> None:
    finding = first(
        healthy_group(noise=1e-5, version=6), healthy_group(noise=0.1, version=5), version=6, began=1e-6
    )  # fmt: skip
    assert finding.id == "healthy"
    assert "age" in finding.text


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_a_scaling_is_the_temperature_and_sure_where_the_environment_has_it(factor: float) -> None:
    scaled = healthy_group(change=lambda logprob, place: factor * logprob)
    finding = first(scaled, temperatures=(0.7,), logprobs_mode="processed")
    assert (finding.id, finding.certainty) == ("temperature", Certainty.SURE)
    assert f"{factor:.2f} times" in finding.text
    assert finding.hint is not None
    assert "--temperature 1" in finding.hint
    assert "--logprobs-mode raw" in finding.hint
    assert first(scaled).certainty is Certainty.LIKELY
    assert first(scaled, temperatures=(1.0,)).certainty is Certainty.POSSIBLE


def test_raw_logprobs_at_another_temperature_are_pointed_at_the_processed_ones() -> None:
    scaled = healthy_group(change=lambda logprob, place: 0.7 * logprob)
    hint = first(scaled, temperatures=(0.7,), logprobs_mode="raw").hint
    assert hint is not None
    assert "--logprobs-mode processed" in hint


def test_a_slight_stretch_of_old_tokens_is_no_temperature_and_a_wide_one_is_doubted() -> None:
    def stretched(factor: float) -> RolloutLine:
        return healthy_group(change=lambda logprob, place: factor * logprob)

    assert "temperature" not in {finding.id for finding in found(stretched(1.15), version=2)}
    doubted = next(finding for finding in found(stretched(1.4), version=2) if finding.id == "temperature")
    assert doubted.certainty is Certainty.POSSIBLE


def test_noise_however_large_is_no_scaling() -> None:
    assert "temperature" not in {finding.id for finding in found(healthy_group(noise=0.8))}


def test_logprobs_of_the_next_token_are_a_shift() -> None:
    finding = first(healthy_group(shift=1))
    assert (finding.id, finding.certainty) == ("shifted", Certainty.SURE)
    assert "the next token" in finding.text
    assert "the token before" in first(healthy_group(shift=-1)).text


def test_end_tokens_that_differ_alone_are_named() -> None:
    finding = first(healthy_group(change=lambda logprob, place: logprob - 3 if place == -1 else logprob))
    assert (finding.id, finding.certainty) == ("end-token", Certainty.SURE)
    assert "the trainer finds it less likely" in finding.text
    assert finding.hint is not None
    assert "--stop" in finding.hint


def test_first_tokens_that_differ_alone_are_the_join_of_prompt_and_completion() -> None:
    finding = first(healthy_group(change=lambda logprob, place: logprob - 3 if place == 0 else logprob))
    assert finding.id == "joint"
    assert finding.hint is not None
    assert "--chat-template" in finding.hint


def broken_at_few(logprob: float, place: int) -> float:
    return -9.0 if place == 7 and logprob > -0.1 else logprob


def test_few_tokens_that_contradict_each_other_are_text_tokenised_again() -> None:
    finding = first(healthy_group(change=broken_at_few, num=40))
    assert finding.id == "retokenised"
    assert finding.hint is not None
    assert "token ids" in finding.hint


def test_the_same_in_a_mixture_of_experts_is_its_routing() -> None:
    finding = first(healthy_group(change=broken_at_few, num=40), model="Qwen/Qwen3-30B-A3B")
    assert finding.id == "routing"
    assert finding.hint is not None
    assert "--correction truncate" in finding.hint


def cut_down(logprob: float, place: int) -> float:
    """The trainer's log-probability where inference chose among tokens of 70% together."""
    return logprob + math.log(0.7)


def test_a_vocabulary_that_top_p_cut_is_likelier_for_inference_throughout() -> None:
    sure = first(healthy_group(change=cut_down), top_ps=(0.7,), logprobs_mode="processed")
    assert (sure.id, sure.certainty) == ("cut-vocabulary", Certainty.SURE)
    assert sure.hint is not None
    assert "--top-p 1" in sure.hint
    assert first(healthy_group(change=cut_down)).certainty is Certainty.POSSIBLE


def test_differences_that_grow_along_the_completion_are_positions() -> None:
    rising = random.Random(1)
    finding = first(healthy_group(change=lambda logprob, place: logprob + rising.gauss(0, max(0, place) * 0.02)))
    assert finding.id == "position"
    assert finding.hint is not None
    assert "rope_scaling" in finding.hint


def aged(noise_by_version: dict[int, float]) -> list[RolloutLine]:
    return [healthy_group(noise=noise, version=version, seed=version) for version, noise in noise_by_version.items()]


def test_differences_that_grow_with_the_age_of_the_weights_are_stale_rollouts() -> None:
    finding = first(*aged({9: 0.001, 8: 0.2, 6: 0.5}), version=9)
    assert (finding.id, finding.certainty) == ("stale", Certainty.SURE)
    assert finding.hint is not None
    assert "--max-staleness" in finding.hint


def test_weights_that_never_arrive_are_named_with_the_bridge() -> None:
    finding = first(*aged({0: 0.5}), version=40)
    assert finding.cause == "inference has old weights"
    assert finding.hint is not None
    assert "--weight-bridge-mode" in finding.hint


def test_fresh_tokens_that_drifted_since_the_start_are_an_adapter_that_is_not_applied() -> None:
    biased = healthy_group(noise=0.3, change=lambda logprob, place: logprob - 0.15)
    finding = first(biased, began=0.001, bridge_mode="lora_only")
    assert (finding.id, finding.certainty) == ("lora", Certainty.LIKELY)
    assert finding.hint is not None
    assert "--enable-lora" in finding.hint
    assert first(biased, began=0.001, bridge_mode="shared_vllm").id == "not-arriving"


def test_tokens_of_one_version_before_must_differ_more_to_blame_the_adapter() -> None:
    for bias, cause in ((0.02, "stale"), (0.6, "lora")):
        biased = healthy_group(noise=0.3, change=lambda logprob, place, by=bias: logprob - by)  # type: ignore[misc]
        assert first(biased, version=1, began=0.001, bridge_mode="lora_only").id == cause


def test_fresh_tokens_of_the_first_steps_alone_do_not_make_the_later_ones_stale() -> None:
    later = [
        healthy_group(step=step, noise=0.3, change=lambda logprob, place: logprob - 0.6, seed=step)
        for step in range(2, 8)
    ]
    numbers = alignment_numbers([group_tokens(healthy_group(), 0), *(group_tokens(one, 1) for one in later)])
    assert numbers is not None
    known = Evidence(numbers=numbers, settings=RunSettings(bridge_mode="lora_only"), began=0.001)
    assert diagnose_alignment(known)[0].id == "lora"


def test_a_disagreement_without_a_sign_is_put_down_to_the_weights() -> None:
    finding = first(healthy_group(noise=0.5), dtypes=("bfloat16", "float16"))
    assert (finding.id, finding.certainty) == ("weights", Certainty.POSSIBLE)
    assert "bfloat16 and float16" in finding.text
    assert finding.hint is not None
    assert "--model-name" in finding.hint


def test_logprobs_that_are_none_are_told() -> None:
    finding = first(group(*[completion([-1.0, -1.0], [1.0, -1.0]) for _ in range(20)]))
    assert (finding.id, finding.certainty) == ("missing", Certainty.SURE)


def test_the_surest_cause_comes_first() -> None:
    scaled = healthy_group(change=lambda logprob, place: 0.7 * logprob + (-3 if place == -1 else 0))
    ranks = [list(Certainty).index(finding.certainty) for finding in found(scaled)]
    assert ranks == sorted(ranks)


def test_every_flag_in_a_hint_is_one_of_a_service() -> None:
    known = {"--openai.server_type"}
    for config in (TrainConfig, ServerConfig, EnvironmentConfig):
        parser = argparse.ArgumentParser(add_help=False)
        add_flags(parser, config)
        known |= {flag for action in parser._actions for flag in action.option_strings}
    named = set(
        re.findall(r"--[a-z][a-z0-9_.-]*[a-z0-9]", inspect.getsource(alignment_rules) + inspect.getsource(alignment))
    )
    assert named
    assert named <= known, named - known


# --- which steps -----------------------------------------------------------------------------------------------------


def looked(num_steps: int = 30) -> AlignmentView:
    measured = Measured(numbers=None, newest_step=num_steps)
    return after(AlignmentView(), GroupsMeasured(measured=measured, settings=RunSettings()))


def test_the_window_turns_and_moves_and_ends_at_the_newest_again() -> None:
    view = looked()
    assert [after(view, WindowTurned()).window, view.window] == [Window.ONE, Window.LAST]
    back = after(view, StepMoved(by=-4))
    assert back.until_step == 26
    assert after(back, StepMoved(by=-100)).until_step == 1
    assert after(back, StepMoved(by=4)).until_step is None
    assert after(back, NewestWanted()).until_step is None
    assert after(AlignmentView(), StepMoved(by=-1)).until_step is None


def test_scrolling_stays_within_the_worst_tokens() -> None:
    numbers = measured(group(completion([-1.0, -2.0, -3.0], [-1.5, -2.6, -3.7])))
    view = after(looked(), GroupsMeasured(measured=Measured(numbers=numbers), settings=RunSettings()))
    assert after(view, TokensScrolled(by=99)).first_token == 2
    assert after(view, TokensScrolled(by=-1)).first_token == 0


def lines(num: int) -> list[MetricsLine]:
    return [metrics_line(step) for step in range(1, num + 1)]


def test_the_reader_measures_the_window_once_until_something_changes(tmp_path: Path) -> None:
    write_groups(tmp_path, [healthy_group(step=step, version=step - 1) for step in range(1, 31)])
    reader = AlignmentReader(tmp_path)
    last = reader.look(Window.LAST, None, lines(30))
    assert last is not None
    assert last.numbers is not None
    assert (last.numbers.first_step, last.numbers.last_step, last.newest_step) == (21, 30, 30)
    assert reader.look(Window.LAST, None, lines(30)) is None
    one = reader.look(Window.ONE, 7, lines(30))
    assert one is not None
    assert one.numbers is not None
    assert (one.numbers.first_step, one.numbers.last_step) == (7, 7)
    write_groups(tmp_path, [healthy_group(step=31, version=30)])
    again = reader.look(Window.ONE, None, lines(30))
    assert again is not None
    assert again.newest_step == 31


def test_groups_of_later_than_the_moment_do_not_count(tmp_path: Path) -> None:
    write_groups(tmp_path, [healthy_group(step=step) for step in range(1, 11)])
    seen = AlignmentReader(tmp_path).look(Window.ALL, None, (), until_time=healthy_group(step=4).time)
    assert seen is not None
    assert seen.newest_step == 4


def test_a_step_that_recorded_nothing_shows_the_one_before(tmp_path: Path) -> None:
    write_groups(tmp_path, [healthy_group(step=step) for step in (1, 5, 9)])
    seen = AlignmentReader(tmp_path).look(Window.ONE, 7, ())
    assert seen is not None
    assert seen.numbers is not None
    assert seen.numbers.last_step == 5


@pytest.mark.slow
def test_a_long_run_is_looked_at_evenly_and_within_bounds(tmp_path: Path) -> None:
    big = healthy_group(num=100, length=50)
    write_groups(tmp_path, [big.model_copy(update={"step": step}) for step in range(1, 41)])
    seen = AlignmentReader(tmp_path).look(Window.ALL, None, ())
    assert seen is not None
    assert seen.numbers is not None
    assert seen.num_groups_known == 40
    assert 1 < seen.numbers.num_groups < 40
    assert seen.numbers.all.num <= 2 * MAX_TOKENS
    assert seen.numbers.last_step == 40


def test_without_recorded_groups_the_reason_is_told(tmp_path: Path) -> None:
    seen = AlignmentReader(tmp_path).look(Window.LAST, None, ())
    assert seen is not None
    assert "no rollouts.jsonl yet" in seen.why_none
    write_groups(tmp_path, [group(completion([], [-1.0]))])
    seen = AlignmentReader(tmp_path).look(Window.LAST, None, ())
    assert seen is not None
    assert "no log-probs" in seen.why_none


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
def test_a_run_that_says_nothing_has_the_usual_clip(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "resolved.json").write_text(text)
    settings = read_settings(tmp_path)
    assert (settings.clip_low, settings.clip_high, settings.is_clip_known) == (0.2, 0.2, False)


def test_the_clip_follows_the_trainers_own_settings(tmp_path: Path) -> None:
    written = json.loads(TrainConfig(model_name="local/tiny", loss="dapo").model_dump_json())
    (tmp_path / "resolved.json").write_text(json.dumps({"services": {"t": {**written, "kind": "trainer"}}}))
    assert read_settings(tmp_path).clip_high == pytest.approx(0.28)


# --- runs that were really trained so ---------------------------------------------------------------------------------

RECORDED = Path(__file__).parents[1] / "recorded" / "alignment" / "runs.tar.gz"
"""The last ten steps of six runs of tiny-cpu, each started with the fault that it is named for: an environment that
kept its temperature of 0.7 to itself, top_p 0.7, eight batches ahead at a high rate, log-probabilities posted a token
late, a server that ignored its adapter; and one without a fault."""


@pytest.mark.parametrize("fault", ["healthy", "temperature", "cut-vocabulary", "stale", "shifted", "lora"])
@pytest.mark.parametrize("window", [Window.LAST, Window.ALL])
def test_the_fault_of_a_real_run_is_named_first(tmp_path: Path, fault: str, window: Window) -> None:
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    run_folder = tmp_path / fault
    seen = AlignmentReader(run_folder).look(window, None, MetricsTail(run_folder / "metrics.jsonl").read().lines)
    assert seen is not None
    assert seen.findings[0].id == fault
    assert seen.findings[0].certainty is not Certainty.POSSIBLE
