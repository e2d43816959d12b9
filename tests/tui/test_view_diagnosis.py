"""Warnings about metrics and services: each trouble is named once, with its cause and the flag that fixes it."""

from types import ModuleType
from typing import Any

import pytest
from hint_flags import named_flags, service_flags
from screen_fakes import GIB, gpu, gpu_short, metrics_line, port_taken, run_status, service

from grpo_engine.diagnosis import alignment, alignment_rules
from grpo_engine.diagnosis.evidence import RunSettings
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.supervisor import ProbeOutcome, RunStatus, ServiceState, ServiceStatus, Warning
from grpo_tui.view import service_rules, training_rules
from grpo_tui.view.diagnosis import UNKNOWN_SETTINGS, diagnose
from grpo_tui.view.metrics.names import band_of, bands_of
from grpo_tui.view.run_settings import settings_of


def steps(num: int = 20, *, since: int = 0, **changes: float | None) -> list[MetricsLine]:
    """A run of `num` steps that is healthy up to `since` and then has `changes`."""
    return [metrics_line(step, **(changes if step > since else {})) for step in range(1, num + 1)]


def status_of(*services: ServiceStatus, **changes: Any) -> RunStatus:
    return run_status(services=list(services), **changes)


def ids(
    lines: list[MetricsLine], status: RunStatus | None = None, settings: RunSettings = UNKNOWN_SETTINGS
) -> list[str]:
    return [warning.id for warning in diagnose(lines, status, settings)]


def only_warning(lines: list[MetricsLine], status: RunStatus | None = None) -> tuple[Warning, str]:
    """The only warning, and its hint."""
    [warning] = diagnose(lines, status)
    assert warning.hint is not None
    return warning, warning.hint


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_a_healthy_run_and_one_without_metrics_have_no_warnings() -> None:
    assert diagnose(steps(), run_status()) == []
    assert diagnose([], None) == []


@pytest.mark.parametrize(
    ("metric", "value", "warned"),
    [
        ("grpo__mean_ratio", 0.79, ["mean-ratio"]),
        ("grpo__mean_ratio", 0.8, []),
        ("grpo__mean_ratio", 1.2, []),
        ("grpo__mean_ratio", 1.21, ["mean-ratio"]),
        ("grpo__clipped_fraction", 0.29, []),
        ("grpo__clipped_fraction", 0.3, ["clipped-fraction"]),
    ],
)
def test_mean_ratio_and_clipping_are_judged_by_their_documented_bands(
    metric: str, value: float, warned: list[str]
) -> None:
    assert ids(steps(**{metric: value})) == warned


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([*steps(19), metrics_line(20, grpo__mean_ratio=1.9)], id="a single step out of band"),
        pytest.param(steps(grpo__entropy=0.01), id="entropy that was always low"),
        pytest.param(
            steps(train__busy_fraction=0.8, rollout__busy_fraction=0.8, train__step_time=5.0), id="little waiting"
        ),
        pytest.param(
            steps(train__busy_fraction=0.2, rollout__busy_fraction=0.2, train__step_time=0.1), id="short steps"
        ),
        pytest.param([*steps(15, train__grad_norm=0.001), *steps(20, train__grad_norm=0.1)[15:]], id="small gradients"),
    ],
)
def test_what_is_no_trouble_is_not_reported(lines: list[MetricsLine]) -> None:
    assert ids(lines) == []


TOO_EASY = {"reward__frac_zero_std": 0.98, "reward__mean": 0.97}
NEVER_REWARDED = {"reward__frac_zero_std": 0.98, "reward__mean": 0.0, "reward__std": 0.0}
SMALL = {"reward__frac_zero_std": 0.98, "reward__mean": 0.004, "reward__std": 0.003}
LARGE = {"reward__frac_zero_std": 0.98, "reward__mean": 3.2}
SINGLE = {"reward__frac_zero_std": 1.0, "reward__mean": 0.0, "reward__std": 0.0, "rollout__group_size_mean": 1.0}
ALIKE = {"reward__frac_zero_std": 0.98, "reward__mean": 0.5}
MISALIGNED = {"alignment__diff_abs_mean": 0.3}
TWO_SIDED = {**MISALIGNED, "alignment__diff_mean": 0.01}


def busy(trainer: float, generation: float, *, step_s: float = 5.0, **limits: float) -> dict[str, float | None]:
    """Shares of the time in which neither side waits for the other, and how far environments sample ahead."""
    shares = {"train__busy_fraction": trainer, "rollout__busy_fraction": generation, "train__step_time": step_s}
    ahead = {"batches_ahead": 4.0, **limits} if limits else {}
    return {**shares, **{f"rollout__{name}": value for name, value in ahead.items()}}


DIFFICULTY = "--task.difficulty, where it has one"


@pytest.mark.parametrize(
    ("since", "changes", "warned", "text", "hints"),
    [
        (10, {"grpo__mean_ratio": 1.5}, "mean-ratio", "1.5", ["--lr", "--warmup-steps 20"]),
        (0, {**MISALIGNED, "alignment__diff_mean": -0.28}, "alignment", "temperature", ["--logprobs-mode"]),
        (0, TWO_SIDED, "alignment", "since the first step", ["--enforce-eager", "--weight-bridge-mode"]),
        (12, MISALIGNED, "alignment", "drift", ["--vllm-restart-interval"]),
        (12, {**MISALIGNED, "rollout__staleness_mean": 3.0}, "alignment", "3.0", ["--max-staleness"]),
        (0, {"logprobs__inference_mean": 0.85}, "inference-logprobs", "0.85", ["--openai.server_type vllm"]),
        (0, TOO_EASY, "equal-rewards", "too easy", [DIFFICULTY]),
        (0, NEVER_REWARDED, "equal-rewards", "no answer is ever rewarded", [DIFFICULTY, "--max-token-length"]),
        (10, NEVER_REWARDED, "equal-rewards", "no answer is rewarded any more", [DIFFICULTY]),
        (0, ALIKE, "equal-rewards", "alike", ["--temperature"]),
        (0, SMALL, "equal-rewards", "alike", ["--temperature"]),
        (0, LARGE, "equal-rewards", "alike", ["--temperature"]),
        (0, SINGLE, "single-groups", "every group has one completion", ["--group-size"]),
        (8, {"grpo__entropy": 0.01}, "entropy", "0.01", []),
        (15, {"train__grad_norm": 25.0}, "grad-norm", "25", []),
        (19, {"train__grad_norm": None}, "not-finite", "train/grad_norm is not finite in step 20", []),
        (0, {"train__loss": -11.0}, "loss", "-11", []),
        (0, {"rollout__truncated_fraction": 0.4}, "truncated", "", ["--max-tokens", "--max-token-length", "--seq-len"]),
        (0, {"rollout__staleness_mean": 6.0, "rollout__staleness_max": 11.0}, "staleness", "11", []),
        (0, {"rollout__stale_groups": 2.0}, "dropped-groups", "2 groups a step", ["--max-staleness", "--max-tokens"]),
        (0, busy(0.4, 0.95), "waiting-sides", "waits for groups 60% of the time: generation", ["--max-workers"]),
        (0, busy(0.95, 0.45), "waiting-sides", "wait for the trainer 55% of the time: tr", ["--compile-layers"]),
        (0, busy(0.5, 0.5), "waiting-sides", "take turns: it waits for groups 50%", ["--max-staleness"]),
        (0, busy(0.4, 1.0, servers_full=1.0), "waiting-sides", "requests queue at the", ["--max-batch-size"]),
        (0, busy(0.4, 1.0, workers_full=1.0), "waiting-sides", "every worker of the", ["--max-workers"]),
        (0, busy(0.4, 1.0, batches_ahead=8.0), "waiting-sides", "8 batches ahead, as", ["--max-batches-offpolicy"]),
        (
            0,
            busy(0.4, 1.0),
            "waiting-sides",
            "generation is the slower side, and would keep up if it were 2.5 times as fast",
            ["--max-workers"],
        ),
        (
            0,
            busy(1.0, 0.5),
            "waiting-sides",
            "training is the slower side, and would keep up if it were 2.0 times as fast",
            ["--compile-layers"],
        ),
    ],
)
def test_a_trouble_of_the_metrics_has_its_cause_and_the_flags_that_fix_it(
    since: int, changes: dict[str, float | None], warned: str, text: str, hints: list[str]
) -> None:
    warning, hint = only_warning(steps(since=since, **changes))
    assert warning.id == warned
    assert text in warning.text
    assert [flag for flag in hints if flag not in hint] == []


def test_a_first_step_in_which_both_sides_agree_is_no_disagreement_since_the_first_step() -> None:
    agree, apart = {"alignment__diff_abs_mean": 5e-7}, {"alignment__diff_abs_mean": 0.8, "alignment__diff_mean": -0.6}
    lines = [metrics_line(1, **agree), *(metrics_line(step, **apart) for step in range(2, 9))]
    warning, _ = only_warning(lines)
    assert "drift apart: log-probs differed by 5.0e-07, now by 0.8" in warning.text


@pytest.mark.parametrize(
    ("versions", "cause", "flag"),
    [
        (1.0, "one step changes the policy by so much", "--lr"),
        (3.0, "are 3.0 policy versions old", "--max-staleness 1"),
    ],
)
def test_where_rollouts_that_are_one_version_old_drift_the_hint_is_smaller_steps(
    versions: float, cause: str, flag: str
) -> None:
    agree = {"alignment__diff_abs_mean": 5e-7}
    apart = {"alignment__diff_abs_mean": 0.8, "rollout__staleness_mean": versions}
    warning, hint = only_warning([metrics_line(1, **agree), *(metrics_line(step, **apart) for step in range(2, 9))])
    assert cause in warning.text
    assert flag in hint
    assert ("--max-staleness 1" in hint) == (versions > 1)


FALLEN = {"reward__mean": 0.07}


@pytest.mark.parametrize(
    ("changes", "others", "cause", "hint"),
    [
        ({}, [], "no other metric says why", "--lr"),
        ({"grpo__mean_ratio": 1.9}, ["mean-ratio"], "updates are too large (mean_ratio is 1.9", "--clip-eps 0.2"),
        ({"alignment__diff_abs_mean": 0.4}, ["alignment"], "trainer and inference disagree", "grpo-engine check"),
        ({"rollout__truncated_fraction": 0.6}, ["truncated"], "longer than their limit", "--max-tokens"),
        ({"grpo__entropy": 6.0}, [], "becomes random", "--kl-coef"),
    ],
)
def test_a_reward_that_falls_is_reported_with_its_likeliest_cause(
    changes: dict[str, float], others: list[str], cause: str, hint: str
) -> None:
    good = [metrics_line(step, reward__mean=0.59 + 0.01 * (step % 3)) for step in range(1, 31)]
    fallen = [metrics_line(step, **FALLEN, **changes) for step in range(31, 41)]
    found = {warning.id: warning for warning in diagnose([*good, *fallen], None)}
    assert sorted(found) == sorted([*others, "falling-reward"])
    assert "fell from 0.6000 to 0.0700" in found["falling-reward"].text
    assert cause in found["falling-reward"].text
    assert hint in (found["falling-reward"].hint or "")


def test_a_reward_that_only_varies_or_has_fallen_for_a_step_does_not_fall() -> None:
    noisy = [metrics_line(step, reward__mean=0.3 + (0.25 if step % 2 else -0.25)) for step in range(1, 41)]
    assert ids(noisy) == []
    assert ids([*steps(39, reward__mean=0.6), metrics_line(40, **FALLEN)]) == []
    assert ids([metrics_line(step, reward__mean=0.1 + step / 50) for step in range(1, 41)]) == []


@pytest.mark.parametrize("changes", [{"logprobs__inference_mean": 0.85}, {"train__loss": -11.0}])
def test_metrics_from_which_nothing_is_learned_are_errors(changes: dict[str, float]) -> None:
    assert only_warning(steps(**changes))[0].severity == "error"


@pytest.mark.parametrize("since", [0, 12])
def test_what_follows_from_misalignment_is_part_of_its_warning(since: int) -> None:
    bad = {"grpo__mean_ratio": 1.5, "grpo__clipped_fraction": 0.46, "alignment__diff_abs_mean": 0.4}
    warning, _ = only_warning(steps(since=since, **bad))
    assert warning.id == "alignment"
    assert warning.text.endswith("; so mean_ratio is 1.500 and 46% of the tokens are outside the clip")


def test_what_follows_from_missing_logprobs_has_no_warning_of_its_own() -> None:
    bad = {"grpo__mean_ratio": 0.2, "alignment__diff_abs_mean": 2.4, "logprobs__inference_mean": 0.85}
    assert ids(steps(**bad)) == ["inference-logprobs"]


GSPO = settings_of({"services": {"trainer": {"kind": "trainer", "loss": "gspo"}}})


@pytest.mark.parametrize(("acting", "warned"), [(0.5, []), (0.7, ["clipped-fraction"])])
def test_clipping_of_sequences_is_judged_by_the_gradient_that_it_takes_away(acting: float, warned: list[str]) -> None:
    lines = steps(grpo__clipped_fraction=0.95, grpo__clipped_fraction_acting=acting)
    assert ids(lines, settings=GSPO) == warned
    assert band_of("grpo/clipped_fraction", bands_of(GSPO)) is None
    assert ids(lines) == ["clipped-fraction"]


@pytest.mark.parametrize(
    ("counts", "settings", "text", "hint"),
    [
        ({"eval__num_prompts": 1.0}, UNKNOWN_SETTINGS, "have 1 held-out prompt, fewer than 16", "held_out_path"),
        ({"eval__num_prompts": 15.0}, RunSettings(eval_prompts=64), "15 held-out prompts", "held_out_path"),
        ({"eval__num_prompts": 8.0}, RunSettings(eval_prompts=8), "±0.18", "set --eval-prompts to 64"),
        (
            {"eval__num_prompts": 66.0, "eval__sums/num_prompts": 2.0},
            UNKNOWN_SETTINGS,
            "of sums have 2",
            "held_out_path",
        ),
    ],
)
def test_an_evaluation_of_few_prompts_is_reported_until_the_next(
    counts: dict[str, float | None], settings: RunSettings, text: str, hint: str
) -> None:
    lines = [*steps(3), metrics_line(4, eval__time=1.0, **counts), *steps(20)[4:]]
    [warning] = diagnose(lines, None, settings)
    assert text in warning.text
    assert hint in (warning.hint or "")
    assert ids([*lines, metrics_line(21, eval__time=1.0, eval__num_prompts=16.0)]) == []


# --- services and GPUs -----------------------------------------------------------------------------------------------

PORT_TAKEN = port_taken("vllm", "ann")
PROFILE_COMMAND = "grpo-tui {} --profile hermes8b-shared"


@pytest.mark.parametrize(
    ("status", "text", "hint"),
    [
        (
            status_of(service("trainer", state="failed", why="no data")),
            "trainer failed: no data",
            "crash-trainer-1.txt",
        ),
        (
            status_of(service("vllm", state="failed", why="exit code 2: no GPU is here", exit_code=2)),
            "no GPU is here",
            PROFILE_COMMAND.format("doctor"),
        ),
        (  # a key copies the command, and a state from elsewhere may name any profile
            status_of(service("vllm", state="failed", exit_code=2)).model_copy(update={"profile": "my a; b"}),
            "exited with code 2",
            "`grpo-tui doctor --profile 'my a; b'`",
        ),
        (status_of(service("env", state="failed", exit_code=-9)), "signal 9", "dmesg"),
        (
            status_of(service("env", state="failed", why="ended by SIGKILL", exit_code=-9, oom_kills=0)),
            "ended by SIGKILL",
            "neither the supervisor nor the out-of-memory killer sent SIGKILL",
        ),
        (
            status_of(
                service("env", state="failed", why="exit code 2: grpo-engine env: task.functions: own:score failed")
            ),
            "own:score failed",
            "correct the function and start the service again",
        ),
        (
            status_of(service("vllm", state="failed", why="torch.OutOfMemoryError: CUDA out of memory")),
            "out of memory",
            "--gpu-memory-utilization 0.4 for vLLM; for the trainer --batch-size 2 with more "
            "--gradient-accumulation-steps, --seq-len 1024, --optimizer adafactor",
        ),
        (status_of(service("vllm", state="unhealthy", health="no answer for 60 s")), "no answer for 60 s", "log"),
        (status_of(PORT_TAKEN), f"vllm failed: {PORT_TAKEN.why}", "asks whether to end that process"),
        (status_of(PORT_TAKEN, state="failed"), "", f"`{PROFILE_COMMAND.format('up')} --take-ports` ends that process"),
        (
            status_of(service("env", state="backoff", restarts=1, exit_code=3)),
            "env exited and is restarted: exited with code 3",
            "",
        ),
        (
            status_of(service("env", state="backoff", failures=3, why="exit code 3; restart 3 of 5 after 4.2 s")),
            "env keeps exiting (3 failures): exit code 3; restart 3 of 5 after 4.2 s",
            "its crash report (c on the screen) is crash-env-1.txt",
        ),
        (run_status(gpus=[gpu(other=12 * GIB)]), "12.0G", ""),
        (
            run_status(gpus=[gpu(other=12 * GIB).model_copy(update={"other_by_user": {"ann": 9 * GIB}})]),
            "(ann 9.0G)",
            "",
        ),
        (
            run_status(gpus=[gpu().model_copy(update={"memory_used_bytes": 79 * GIB})]),
            "GPU 0 is nearly full",
            "",
        ),
    ],
)
def test_a_trouble_of_a_service_or_gpu_has_its_cause_and_what_to_do(status: RunStatus, text: str, hint: str) -> None:
    warning, its_hint = only_warning([], status)
    assert text in warning.text
    assert hint in its_hint


def test_the_hint_for_too_little_gpu_memory_offers_to_end_no_process() -> None:
    _, hint = only_warning([], status_of(gpu_short("vllm", "ann")))
    assert hint == "once that is resolved, s on the screen starts the service"


@pytest.mark.parametrize(
    ("probe", "words"), [(ProbeOutcome.SILENT, "hangs"), (ProbeOutcome.ENGINE_STALLED, "its engine is stalled")]
)
def test_an_inference_server_that_hangs_or_stalls_is_called_so_and_v_restarts_it(
    probe: ProbeOutcome, words: str
) -> None:
    warning, hint = only_warning([], status_of(service("vllm", state="unhealthy", probe=probe, health="x")))
    assert words in warning.text
    assert hint.startswith("`grpo-tui restart vllm` (v on the screen) restarts it")


def test_a_stalled_engine_is_reported_before_its_service_is_unhealthy_and_one_late_answer_is_not() -> None:
    stalled = service("vllm", probe=ProbeOutcome.ENGINE_STALLED, health="/health answers 503: no token for 130 s")
    assert "no token for 130 s" in only_warning([], status_of(stalled))[0].text
    assert ids([], status_of(service("vllm", probe=ProbeOutcome.SILENT))) == []


def test_last_lines_of_a_log_are_left_to_the_crash_report() -> None:
    failed = service("env", state="failed", why="exit code 3; last lines:\n  RuntimeError: no data")
    warning, hint = only_warning([], status_of(failed))
    assert warning.text == "env failed: exit code 3"
    assert "its crash report (c on the screen) is crash-env-1.txt" in hint


def test_a_start_after_failures_names_the_report_on_the_last_and_one_after_restarts_by_request_is_no_trouble() -> None:
    warning, hint = only_warning([], status_of(service("vllm", state="starting", attempt=4, restarts=3, failures=2)))
    assert warning.text == "vllm is starting again after 2 failures"
    assert "crash-vllm-3.txt" in hint
    assert ids([], status_of(service("vllm", state="starting", attempt=4, restarts=3))) == []


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_trainer_without_any_environment_left_is_reported_with_how_they_ended(state: str) -> None:
    ended = service("env", state=state, why="exit code 0", pid=None)
    warning, hint = only_warning([], status_of(ended, service("trainer")))
    assert warning.text.startswith(f"no environment is running: env {state} (exit code 0). The trainer gets no batches")
    assert hint.startswith("`grpo-tui start env`")


ENDED = service("env", state="finished", pid=None)


@pytest.mark.parametrize("state", ["ready", "starting", "backoff", "waiting"])
def test_one_environment_that_goes_on_is_enough(state: str) -> None:
    other = service("other", kind="environment", state=ServiceState(state))
    assert "no-environment" not in ids([], status_of(ENDED, other, service("trainer")))


@pytest.mark.parametrize(
    "status",
    [
        *(status_of(ENDED, service("trainer", state=state)) for state in ("waiting", "finished", "stopping")),
        status_of(ENDED, service("trainer"), is_ending=True),
        status_of(ENDED, service("trainer"), state="stopped"),
    ],
)
def test_environments_may_end_before_or_after_the_training(status: RunStatus) -> None:
    assert ids([], status) == []


def test_a_crash_loop_stays_one_warning_while_the_service_starts_again() -> None:
    for state in ("backoff", "starting"):
        assert ids([], status_of(service("env", state=state, failures=2, why="w"))) == ["restarting:env"]
    assert ids([], status_of(service("env", state="starting", restarts=1))) == []


def test_gpu_memory_of_a_display_is_not_reported() -> None:
    assert ids([], run_status(gpus=[gpu(other=200 << 20)])) == []


def test_errors_come_first() -> None:
    status = status_of(service("env", state="failed"), gpus=[gpu(other=12 * GIB)])
    assert [warning.severity for warning in diagnose([], status)] == ["error", "warning"]


@pytest.mark.parametrize("rules", [service_rules, training_rules, alignment_rules, alignment])
def test_every_flag_in_a_hint_is_one_of_a_service(rules: ModuleType) -> None:
    assert named_flags(rules) <= service_flags()


def test_hints_of_every_set_of_rules_name_flags() -> None:
    assert all(map(named_flags, (service_rules, training_rules, alignment_rules)))
