"""Diagnosis on made-up runs: each trouble is named once, with its cause and the flag that mends it."""

import argparse
import inspect
import re

import pytest
from screen_fakes import GIB, gpu, gpu_short, metrics_line, port_taken, run_status, service

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.flags import add_flags
from grpo_engine.server.config import ServerConfig
from grpo_engine.train.config import TrainConfig
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.supervisor import ProbeOutcome, ServiceState, Warning
from grpo_tui.view import service_rules, training_rules
from grpo_tui.view.diagnosis import diagnose


def steps(num: int = 20, *, since: int = 0, **changes: float | None) -> list[MetricsLine]:
    """A run of `num` steps that is healthy up to `since` and then has `changes`."""
    return [metrics_line(step, **(changes if step > since else {})) for step in range(1, num + 1)]


def only(warnings: list[Warning]) -> Warning:
    assert len(warnings) == 1, [warning.text for warning in warnings]
    return warnings[0]


def test_a_healthy_run_has_no_warnings() -> None:
    assert diagnose(steps(), run_status()) == []


def test_no_metrics_and_no_status_is_no_trouble() -> None:
    assert diagnose([], None) == []


@pytest.mark.parametrize(("ratio", "is_bad"), [(0.79, True), (0.8, False), (1.2, False), (1.21, True)])
def test_the_mean_ratio_is_judged_by_its_documented_band(ratio: float, is_bad: bool) -> None:
    found = diagnose(steps(grpo__mean_ratio=ratio), None)
    assert [warning.id for warning in found] == (["mean-ratio"] if is_bad else [])


def test_a_single_odd_step_is_not_a_trouble() -> None:
    assert diagnose([*steps(19), metrics_line(20, grpo__mean_ratio=1.9)], None) == []


def test_a_ratio_out_of_band_names_the_learning_rate() -> None:
    hint = only(diagnose(steps(grpo__mean_ratio=1.5, since=10), None)).hint
    assert hint is not None
    assert "--lr" in hint
    assert "--warmup-steps 20" in hint


@pytest.mark.parametrize("since", [0, 12])
def test_what_follows_from_misalignment_is_told_with_it_and_not_beside_it(since: int) -> None:
    bad = {"grpo__mean_ratio": 1.5, "grpo__clipped_fraction": 0.46, "alignment__diff_abs_mean": 0.4}
    warning = only(diagnose(steps(since=since, **bad), None))
    assert warning.id == "alignment"
    assert warning.text.endswith("; so mean_ratio is 1.500 and 46% of the tokens are outside the clip")


def test_all_that_follows_from_missing_logprobs_is_not_told_beside_them() -> None:
    bad = {"grpo__mean_ratio": 0.2, "alignment__diff_abs_mean": 2.4, "logprobs__inference_mean": 0.85}
    assert only(diagnose(steps(**bad), None)).id == "inference-logprobs"


@pytest.mark.parametrize(("share", "is_bad"), [(0.29, False), (0.3, True), (0.46, True)])
def test_clipping_is_too_much_from_thirty_percent(share: float, is_bad: bool) -> None:
    found = diagnose(steps(grpo__clipped_fraction=share), None)
    assert [warning.id for warning in found] == (["clipped-fraction"] if is_bad else [])


def test_a_one_sided_disagreement_from_the_first_step_points_at_the_temperature_convention() -> None:
    warning = only(diagnose(steps(alignment__diff_abs_mean=0.3, alignment__diff_mean=-0.28), None))
    assert "since the first step" in warning.text
    assert "temperature" in warning.text
    assert warning.hint is not None
    assert "--logprobs-mode" in warning.hint


def test_a_two_sided_disagreement_from_the_first_step_points_at_the_weights() -> None:
    warning = only(diagnose(steps(alignment__diff_abs_mean=0.3, alignment__diff_mean=0.01), None))
    assert warning.hint is not None
    assert "--enforce-eager" in warning.hint
    assert "--weight-bridge-mode" in warning.hint


def test_a_growing_disagreement_points_at_stale_weights() -> None:
    warning = only(diagnose(steps(alignment__diff_abs_mean=0.3, since=12), None))
    assert "drift" in warning.text
    assert warning.hint is not None
    assert "--vllm-restart-interval" in warning.hint


def test_a_growing_disagreement_of_old_rollouts_points_at_their_age() -> None:
    warning = only(diagnose(steps(alignment__diff_abs_mean=0.3, rollout__staleness_mean=3.0, since=12), None))
    assert warning.hint is not None
    assert "--max-staleness" in warning.hint


def test_positive_inference_logprobs_are_no_logprobs() -> None:
    warning = only(diagnose(steps(logprobs__inference_mean=0.85), None))
    assert warning.severity == "error"
    assert warning.hint is not None
    assert "--openai.server_type vllm" in warning.hint


@pytest.mark.parametrize(("reward", "cause"), [(0.97, "too easy"), (0.0, "no answer is ever rewarded"), (0.5, "alike")])
def test_equal_rewards_are_explained_by_their_level(reward: float, cause: str) -> None:
    warning = only(diagnose(steps(reward__frac_zero_std=0.98, reward__mean=reward), None))
    assert cause in warning.text


def test_equal_rewards_at_a_middling_level_name_the_temperature() -> None:
    hint = only(diagnose(steps(reward__frac_zero_std=0.98, reward__mean=0.5), None)).hint
    assert hint is not None
    assert "--temperature" in hint


def test_entropy_that_collapses_is_told_and_entropy_that_was_always_low_is_not() -> None:
    assert only(diagnose(steps(grpo__entropy=0.01, since=8), None)).id == "entropy"
    assert diagnose(steps(grpo__entropy=0.01), None) == []


def test_a_metric_that_is_missing_from_the_newest_step_was_not_finite() -> None:
    warning = only(diagnose([*steps(19), metrics_line(20, train__grad_norm=None)], None))
    assert warning.text.startswith("train/grad_norm is not finite in step 20")


def test_a_jump_of_the_gradient_is_told() -> None:
    warning = only(diagnose(steps(train__grad_norm=25.0, since=15), None))
    assert warning.id == "grad-norm"
    assert "25" in warning.text


def test_a_jump_from_tiny_to_small_gradients_is_not_huge() -> None:
    found = diagnose([metrics_line(s, train__grad_norm=0.001 if s < 16 else 0.1) for s in range(1, 21)], None)
    assert found == []


def test_a_loss_that_ran_away_is_an_error() -> None:
    assert only(diagnose(steps(train__loss=-11.0), None)).severity == "error"


def test_truncated_completions_name_the_token_limit() -> None:
    hint = only(diagnose(steps(rollout__truncated_fraction=0.4), None)).hint
    assert hint is not None
    assert "--max-tokens" in hint


def test_hints_name_a_difficulty_only_for_tasks_that_have_one() -> None:
    for changes in ({"reward__mean": 1.0}, {"reward__mean": 0.0}):
        hint = only(diagnose(steps(reward__frac_zero_std=1.0, **changes), None)).hint
        assert hint is not None
        assert "--task.difficulty, where it has one" in hint


def test_conversations_that_run_out_of_room_are_pointed_at_the_room() -> None:
    cut_off = only(diagnose(steps(rollout__truncated_fraction=0.4), None)).hint
    unrewarded = only(diagnose(steps(reward__frac_zero_std=1.0, reward__mean=0.0), None)).hint
    assert cut_off is not None
    assert unrewarded is not None
    assert "--max-token-length" in cut_off
    assert "--seq-len" in cut_off
    assert "--max-token-length" in unrewarded


def test_old_rollouts_are_told() -> None:
    warning = only(diagnose(steps(rollout__staleness_mean=6.0, rollout__staleness_max=11.0), None))
    assert warning.id == "staleness"
    assert "11" in warning.text


def test_a_failed_service_is_told_with_its_why_and_its_log() -> None:
    warning = only(diagnose([], run_status(services=[service("trainer", state="failed", why="no data", pid=None)])))
    assert warning.text == "trainer failed: no data"
    assert warning.hint is not None
    assert "trainer.log" in warning.hint


def test_where_a_setting_or_the_machine_is_to_blame_the_doctor_is_named() -> None:
    broken = service("vllm", state="failed", why="exit code 2: no GPU is here", exit_code=2)
    warning = only(diagnose([], run_status(services=[broken])))
    assert warning.hint is not None
    assert "grpo-tui doctor --profile hermes8b-shared" in warning.hint


def test_a_failure_without_words_names_its_exit() -> None:
    status = run_status(services=[service("env", state="failed", exit_code=-9)])
    warning = only(diagnose([], status))
    assert "signal 9" in warning.text
    assert warning.hint is not None
    assert "dmesg" in warning.hint


def test_out_of_memory_names_the_flags_that_save_memory() -> None:
    status = run_status(services=[service("vllm", state="failed", why="torch.OutOfMemoryError: CUDA out of memory")])
    hint = only(diagnose([], status)).hint
    assert hint is not None
    assert "--gpu-memory-utilization 0.4" in hint
    assert "--optimizer adafactor" in hint


def test_an_unhealthy_service_is_told() -> None:
    status = run_status(services=[service("vllm", state="unhealthy", health="no answer for 60 s")])
    assert "no answer for 60 s" in only(diagnose([], status)).text


@pytest.mark.parametrize(
    ("probe", "words"), [(ProbeOutcome.SILENT, "hangs"), (ProbeOutcome.ENGINE_STALLED, "its engine is stalled")]
)
def test_an_inference_server_that_hangs_or_stalls_is_called_so_and_v_restarts_it(
    probe: ProbeOutcome, words: str
) -> None:
    warning = only(diagnose([], run_status(services=[service("vllm", state="unhealthy", probe=probe, health="x")])))
    assert words in warning.text
    assert warning.hint is not None
    assert warning.hint.startswith("`v` or `grpo-tui restart vllm` restarts it")


def test_a_stalled_engine_is_told_before_its_service_counts_as_unhealthy_and_one_late_answer_is_not() -> None:
    stalled = service("vllm", probe=ProbeOutcome.ENGINE_STALLED, health="/health answers 503: no token for 130 s")
    assert "no token for 130 s" in only(diagnose([], run_status(services=[stalled]))).text
    assert diagnose([], run_status(services=[service("vllm", probe=ProbeOutcome.SILENT)])) == []


def test_a_taken_port_is_told_with_its_holder_and_the_key_that_asks() -> None:
    taken = port_taken("vllm", "ann")
    warning = only(diagnose([], run_status(services=[taken])))
    assert warning.text == f"vllm failed: {taken.why}"
    assert warning.hint is not None
    assert "asks whether to end that process" in warning.hint
    hint = only(diagnose([], run_status(state="failed", services=[taken]))).hint
    assert hint is not None
    assert hint.startswith("`grpo-tui up --profile hermes8b-shared --take-ports` ends that process")


def test_a_lack_of_gpu_memory_is_told_without_an_offer_to_end_anybody() -> None:
    warning = only(diagnose([], run_status(services=[gpu_short("vllm", "ann")])))
    assert warning.hint == "once that is resolved, s on the screen starts the service"


def test_last_lines_of_a_log_are_left_to_the_crash_report() -> None:
    failed = service("env", state="failed", why="exit code 3; last lines:\n  RuntimeError: no data")
    warning = only(diagnose([], run_status(services=[failed])))
    assert warning.text == "env failed: exit code 3"
    assert warning.hint is not None
    assert "c opens its crash report" in warning.hint


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_trainer_without_any_environment_left_is_told_with_how_they_ended(state: str) -> None:
    gone = service("env", state=state, why="exit code 0", pid=None)
    warning = only(diagnose([], run_status(services=[gone, service("trainer")])))
    assert warning.text.startswith(f"no environment is running: env {state} (exit code 0). The trainer gets no batches")
    assert warning.hint is not None
    assert warning.hint.startswith("`grpo-tui start env`")


def test_one_environment_that_goes_on_is_enough() -> None:
    gone, other = service("env", state="finished", pid=None), service("other", kind="environment")
    for state in ("ready", "starting", "backoff", "waiting"):
        going_on = other.model_copy(update={"state": ServiceState(state)})
        found = diagnose([], run_status(services=[gone, going_on, service("trainer")]))
        assert "no-environment" not in {warning.id for warning in found}


def test_environments_may_end_before_or_after_the_training() -> None:
    gone = service("env", state="finished", pid=None)
    for trainer in ("waiting", "finished", "stopping"):
        assert diagnose([], run_status(services=[gone, service("trainer", state=trainer)])) == []
    assert diagnose([], run_status(is_ending=True, services=[gone, service("trainer")])) == []
    assert diagnose([], run_status(state="stopped", services=[gone, service("trainer")])) == []


def test_memory_of_strangers_is_told_by_user() -> None:
    shared = gpu(other=12 * GIB).model_copy(update={"other_by_user": {"ann": 9 * GIB}})
    assert "(ann 9.0G)" in only(diagnose([], run_status(gpus=[shared]))).text


def test_a_service_in_backoff_is_told_with_how_it_ended() -> None:
    status = run_status(services=[service("env", state="backoff", restarts=1, exit_code=3)])
    assert only(diagnose([], status)).text == "env exited and is restarted: exited with code 3"


def test_a_crash_loop_is_told_with_its_count_its_last_reason_and_where_to_read_more() -> None:
    why = "exit code 3; restart 3 of 5 after 4.2 s"
    status = run_status(services=[service("env", state="backoff", restarts=2, exit_code=3, why=why)])
    warning = only(diagnose([], status))
    assert warning.text == f"env keeps exiting (2 restarts): {why}"
    assert warning.hint is not None
    assert "crash report" in warning.hint
    assert "`grpo-tui logs env`" in warning.hint


def test_a_crash_loop_stays_one_warning_while_the_service_starts_again() -> None:
    both = [
        run_status(services=[service("env", state=state, restarts=2, why="w")]) for state in ("backoff", "starting")
    ]
    assert {only(diagnose([], status)).id for status in both} == {"restarting:env"}
    assert diagnose([], run_status(services=[service("env", state="starting", restarts=1)])) == []


def test_memory_of_strangers_is_told_and_a_display_is_not() -> None:
    assert "12.0G" in only(diagnose([], run_status(gpus=[gpu(other=12 * GIB)]))).text
    assert diagnose([], run_status(gpus=[gpu(other=200 << 20)])) == []


def test_a_gpu_that_is_nearly_full_is_told() -> None:
    full = gpu().model_copy(update={"memory_used_bytes": 79 * GIB})
    assert only(diagnose([], run_status(gpus=[full]))).id == "gpu-full:0"


def test_the_gravest_trouble_comes_first() -> None:
    status = run_status(gpus=[gpu(other=12 * GIB)], services=[service("env", state="failed")])
    assert [warning.severity for warning in diagnose([], status)] == ["error", "warning"]


def test_every_flag_in_a_hint_is_one_of_a_service() -> None:
    known = {"--openai.server_type"}  # of the stock environments, which are not ours
    known |= {"--profile", "--take-ports"}  # of grpo-tui itself
    for config in (TrainConfig, ServerConfig, EnvironmentConfig):
        parser = argparse.ArgumentParser(add_help=False)
        add_flags(parser, config)
        known |= {flag for action in parser._actions for flag in action.option_strings}
    for rules in (service_rules, training_rules):
        named = set(re.findall(r"--[a-z][a-z0-9_.-]*[a-z0-9]", inspect.getsource(rules)))
        assert named
        assert named <= known, named - known
