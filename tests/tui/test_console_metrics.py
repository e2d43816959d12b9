"""What a program prints becomes steps: with the lines of the stock trainer, and with programs that print otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from grpo_engine.errors import ConfigError
from grpo_engine.wire.metrics import MetricsLine
from grpo_tui.profile.loading import load
from grpo_tui.services.base import ConsoleMetric
from grpo_tui.supervisor.report.console_metrics import (
    StepReader,
    StepRecord,
    WrittenSteps,
    append_line,
    marked_offset,
    written_steps,
)

PROFILE = Path(__file__).parents[2] / "profiles" / "atropos-stock.toml"
STOCK_STEP = """
Step 3/30
    [Data] ✓ inference_logprobs found in batch (sample len: 55)
    [DEBUG] Logprob gap: ref=-1.200, train=-4.100
  Saving LoRA adapter to /x/adapter_step_3...
  Adapter saved.
  [LORA] ✓ Hot-swapped adapter via custom API: step_3
  Loss: -0.003595, Grad norm: 0.4506, Step time: 2.43s, Sync time: 6.27s, Data fetch: 0.01s, GPU mem: 12.34GB
    GRPO: ratio=0.998, clipped=12.5%
    Advantages: +8 / -8, LogP: pos=-1.074, neg=-1.170
""".splitlines()
STOCK_METRICS = {
    "rollout/first_length": 55,
    "logprobs/inference_mean": -1.2,
    "logprobs/training_mean": -4.1,
    "train/loss": -0.003595,
    "train/grad_norm": 0.4506,
    "train/step_time": 2.43,
    "train/sync_time": 6.27,
    "train/data_fetch_time": 0.01,
    "train/gpu_memory_gb": 12.34,
    "grpo/mean_ratio": 0.998,
    "grpo/clipped_fraction": 0.125,
    "train/pos_count": 8,
    "train/neg_count": 8,
    "train/pos_logp": -1.074,
    "train/neg_logp": -1.170,
}
LOSS_AND_RATIO = {"step": r"^Step (\d+)", "loss": r"Loss: (\S+)", "ratio": r"ratio=(\S+)"}


def stock_console() -> Mapping[str, ConsoleMetric]:
    """The table of the profile that ships."""
    return load(str(PROFILE)).profile.services["trainer"].console


def reader(
    patterns: Mapping[str, str] = LOSS_AND_RATIO,
    *,
    messages: list[str] | None = None,
    written: WrittenSteps | None = None,
) -> StepReader:
    """One for a small table."""
    console = {name: ConsoleMetric(pattern=pattern) for name, pattern in patterns.items()}
    return StepReader(console, report=[].append if messages is None else messages.append, written=written)


def read_all(reader: StepReader, lines: Iterable[str]) -> list[StepRecord]:
    """Every step of a program that has ended."""
    return [record for line in lines for record in reader.read(line)] + reader.end()


def steps_and_metrics(records: Iterable[StepRecord]) -> list[tuple[int, dict[str, float]]]:
    return [(record.step, dict(record.metrics)) for record in records]


# --- the stock trainer ---------------------------------------------------------------------------------------------


def test_every_number_of_a_stock_step_gets_the_name_it_has_in_a_run_folder() -> None:
    (record,) = read_all(StepReader(stock_console(), report=[].append), STOCK_STEP)
    assert (record.step, record.policy_version) == (3, 3)
    assert record.metrics == pytest.approx(STOCK_METRICS)


def test_a_stock_step_without_benchmark_has_no_times() -> None:
    lines = ["Step 1/2", "  Loss: 0.1234, Grad norm: 0.4506", "    GRPO: ratio=0.998, clipped=0.0%"]
    (record,) = read_all(StepReader(stock_console(), report=[].append), lines)
    assert set(record.metrics) == {"train/loss", "train/grad_norm", "grpo/mean_ratio", "grpo/clipped_fraction"}


def test_misaligned_logprobs_of_the_stock_trainer_are_seen() -> None:
    lines = ["Step 1/2", "    [WARNING] ref_logprobs avg 0.850 (should be negative!)"]
    (record,) = read_all(StepReader(stock_console(), report=[].append), lines)
    assert record.metrics == {"logprobs/inference_mean": 0.85}


@pytest.mark.parametrize(
    "line",
    [
        "    [Data] ⚠ inference_logprobs key exists but is empty!",
        "    [WARNING] This suggests inference_logprobs alignment is wrong",
        "  [SINGLE-COPY] Weights updated in-place - step 4",
        "  Saving checkpoint to /x/step_4...",
        "  [LORA] ✗ Hot-swap failed: step_4",
        "  [LORA] ✓ Hot-swapped adapter via custom API: final",
        "  [RESTART] vLLM restarted in 45.0s",
        "  GPU memory: 3 GB",
        "Training for 30 steps on cuda",
        "Training finished.",
        "    Avg step time:         0.27s",
        "    Peak GPU memory:       11.00 GB",
    ],
)
def test_other_lines_of_the_stock_trainer_measure_nothing(line: str) -> None:
    assert read_all(StepReader(stock_console(), report=[].append), ["Step 1/30", line]) == []


def test_a_policy_version_counts_only_when_the_server_has_loaded_it() -> None:
    lines = ["Step 1/9", "  Loss: 0.1, Grad norm: 0.4", "  [LORA] ✗ Hot-swap failed: busy", "Step 2/9"]
    lines += ["  [LORA] ✓ Hot-swapped adapter: step_2", "  Loss: 0.1, Grad norm: 0.4", "Step 3/9"]
    lines += ["  Loss: 0.2, Grad norm: 0.4"]
    records = read_all(StepReader(stock_console(), report=[].append), lines)
    assert [(record.step, record.policy_version) for record in records] == [(1, 0), (2, 2), (3, 2)]


def test_without_a_line_about_the_policy_the_step_stands_for_it() -> None:
    assert [record.policy_version for record in read_all(reader(), ["Step 7", "Loss: 1"])] == [7]


def test_nan_is_left_out_and_reported_once() -> None:
    messages: list[str] = []
    lines = ["Step 7/9", "  Loss: nan, Grad norm: inf", "    GRPO: ratio=1.000, clipped=nan%"]
    lines += ["Step 8/9", "  Loss: nan, Grad norm: 0.5000", "    GRPO: ratio=1.000, clipped=0.0%"]
    records = read_all(StepReader(stock_console(), report=messages.append), lines)
    assert steps_and_metrics(records) == [
        (7, {"grpo/mean_ratio": 1.0}),
        (8, {"train/grad_norm": 0.5, "grpo/mean_ratio": 1.0, "grpo/clipped_fraction": 0.0}),
    ]
    assert messages == [
        "train/loss is nan at step 7: left out of the metrics (reported once)",
        "train/grad_norm is inf at step 7: left out of the metrics (reported once)",
        "grpo/clipped_fraction is nan at step 7: left out of the metrics (reported once)",
    ]


# --- when a step is given ------------------------------------------------------------------------------------------


def test_a_step_is_returned_when_the_next_one_opens() -> None:
    steps = reader()
    assert [*steps.read("Step 1"), *steps.read("Loss: 0.5")] == []
    assert steps_and_metrics(steps.read("Step 2")) == [(1, {"loss": 0.5})]


def test_a_step_without_new_values_is_returned_before_the_next_one_opens() -> None:
    steps = reader()
    for line in ("Step 1", "Loss: 0.5", "ratio=1.0"):
        steps.read(line)
    assert steps.settle() == []
    assert steps_and_metrics(steps.settle()) == [(1, {"loss": 0.5, "ratio": 1.0})]
    assert steps.settle() == steps.read("Step 2") == []


def test_an_incomplete_step_is_waited_for() -> None:
    steps = reader()
    for line in ("Step 1", "Loss: 0.5", "ratio=1.0", "Step 2", "Loss: 0.4"):
        steps.read(line)
    assert [*steps.settle(), *steps.settle(), *steps.settle()] == []
    steps.read("ratio=0.9")
    assert steps.settle() == []
    assert steps_and_metrics(steps.settle()) == [(2, {"loss": 0.4, "ratio": 0.9})]


def test_an_occasional_metric_does_not_delay_steps_without_it() -> None:
    steps = reader()
    for line in ("Step 1", "Loss: 0.5", "ratio=1.0", "Step 2", "Loss: 0.4", "Step 3", "Loss: 0.3"):
        steps.read(line)
    steps.settle()
    assert steps_and_metrics(steps.settle()) == [(3, {"loss": 0.3})]


def test_late_values_return_the_whole_step_again() -> None:
    steps = reader()
    for line in ("Step 1", "Loss: 0.5"):
        steps.read(line)
    steps.settle()
    assert steps_and_metrics(steps.settle()) == [(1, {"loss": 0.5})]
    steps.read("ratio=1.0")
    assert steps_and_metrics(steps.end()) == [(1, {"loss": 0.5, "ratio": 1.0})]


def test_of_a_value_printed_twice_in_a_step_the_later_counts() -> None:
    assert steps_and_metrics(read_all(reader(), ["Step 1", "Loss: 0.5", "Loss: 0.4"])) == [(1, {"loss": 0.4})]


def test_a_step_and_its_values_may_share_a_line() -> None:
    lines = ["Step 1 Loss: 0.5 ratio=1", "Step 2 Loss: 0.4 ratio=1"]
    found = steps_and_metrics(read_all(reader(), lines))
    assert found == [(1, {"loss": 0.5, "ratio": 1.0}), (2, {"loss": 0.4, "ratio": 1.0})]


def test_a_step_without_values_is_not_returned() -> None:
    assert [record.step for record in read_all(reader(), ["Step 1", "Step 2", "Loss: 1", "Step 3"])] == [2]


def test_colours_do_not_hide_a_value() -> None:
    lines = ["\x1b[1mStep 1\x1b[0m", "\x1b[2K\x1b[32mLoss: 0.5\x1b[0m"]
    assert steps_and_metrics(read_all(reader(), lines)) == [(1, {"loss": 0.5})]


def test_an_optional_group_that_is_not_there_is_no_value() -> None:
    patterns = {"step": r"^Step (\d+)", "time": r"Loss: \S+(?:, Time: (\S+)s)?"}
    assert read_all(reader(patterns), ["Step 1", "Loss: 0.5"]) == []


def test_a_scale_converts_the_printed_number() -> None:
    console = {"step": ConsoleMetric(pattern=r"^Step (\d+)"), "rate": ConsoleMetric(pattern=r"(\d+)k/s", scale=1000)}
    assert steps_and_metrics(read_all(StepReader(console, report=[].append), ["Step 1", "3k/s"])) == [
        (1, {"rate": 3000})
    ]


def test_a_pattern_that_matches_more_than_a_number_is_reported() -> None:
    messages: list[str] = []
    assert steps_and_metrics(read_all(reader(messages=messages), ["Step 1", "Loss: 0.5,"])) == [(1, {})]
    assert messages == [
        "loss is '0.5,', which is not a number at step 1: narrow the first group of its pattern (reported once)"
    ]


def test_values_without_any_step_are_reported_at_the_end() -> None:
    messages: list[str] = []
    assert read_all(reader(messages=messages), ["step: 1", "Loss: 0.5"]) == []
    assert messages == [
        "loss printed without a step, so not kept: no line matched step = '^Step (\\\\d+)'; correct that pattern"
    ]


# --- going on ------------------------------------------------------------------------------------------------------

LOG = [line for step in range(1, 6) for line in (f"Step {step}", f"Loss: {step / 10}", f"ratio={step}")]
ALL = [(step, {"loss": step / 10, "ratio": float(step)}) for step in range(1, 6)]


def written(*given: tuple[int, dict[str, float]]) -> WrittenSteps:
    step, metrics = given[-1]
    last = MetricsLine(time=0.0, step=step, policy_version=step, metrics=metrics)
    return WrittenSteps(steps=tuple(step for step, _ in given), last=last)


@pytest.mark.parametrize("num_written", [1, 2, 3, 4])
def test_a_successor_returns_only_unwritten_steps(num_written: int) -> None:
    successor = reader(written=written(*ALL[:num_written]))
    assert steps_and_metrics(read_all(successor, LOG)) == ALL[num_written:]


def test_a_successor_completes_a_step_that_was_written_in_part() -> None:
    successor = reader(written=written(*ALL[:2], (3, {"loss": 0.3})))
    assert steps_and_metrics(read_all(successor, LOG)) == ALL[2:]


def test_a_successor_reads_a_log_whose_older_half_was_dropped() -> None:
    successor = reader(written=written(*ALL[:4]))
    assert steps_and_metrics(read_all(successor, LOG[7:])) == ALL[4:]


def test_a_successor_follows_a_program_that_counts_from_1_again() -> None:
    successor = reader(written=written(*ALL, *ALL[:2]))
    assert steps_and_metrics(read_all(successor, [*LOG, *LOG])) == ALL[2:]


def test_a_successor_keeps_the_policy_that_was_handed_over() -> None:
    patterns = {**LOSS_AND_RATIO, "policy_version": r"policy (\d+)"}
    last = MetricsLine(time=0.0, step=2, policy_version=1, metrics={"loss": 0.2})
    successor = reader(patterns, written=WrittenSteps(steps=(2,), last=last))
    assert [record.policy_version for record in read_all(successor, ["Step 3", "Loss: 0.3"])] == [1]


def test_a_line_torn_by_a_crash_spoils_no_other(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    whole = json.dumps({"time": 1.0, "step": 1, "policy_version": 1, "metrics": {"loss": 0.5}})
    file.write_text(whole + "\n" + whole[:20])
    append_line(file, whole.replace('"step": 1', '"step": 2').encode() + b"\n")
    assert written_steps(file, 0).steps == (1, 2)


def test_steps_of_an_earlier_attempt_are_none_of_this_one(tmp_path: Path) -> None:
    file, line = tmp_path / "metrics.jsonl", '{"time": 1, "step": %d, "policy_version": 1, "metrics": {}}\n'
    file.write_text(line % 1 + line % 2)
    offset = marked_offset(tmp_path / "mark", file)
    with file.open("a") as more:
        more.write(line % 1)
    assert marked_offset(tmp_path / "mark", file) == offset
    assert written_steps(file, offset).steps == (1,)


# --- profiles ------------------------------------------------------------------------------------------------------

COMMAND = """
[services.{name}]
kind = "command"
argv = ["true"]
console = {console}
"""
STEP = r"{ step = '^Step (\d+)', loss = 'Loss: (\S+)' }"


def test_a_console_table_without_a_step_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(COMMAND.format(name="a", console="{ loss = 'Loss: (.+)' }"))
    with pytest.raises(ConfigError, match=r"services\.a\.console: no pattern for 'step' among loss"):
        load(str(file))


def test_two_writers_of_the_metrics_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(COMMAND.format(name="a", console=STEP) + COMMAND.format(name="b", console=STEP))
    with pytest.raises(
        ConfigError, match=r"services\.b\.console: metrics\.jsonl has one writer, which is services\.a\.con"
    ):
        load(str(file))


def test_a_trainer_service_writes_the_metrics_itself(tmp_path: Path) -> None:
    trainer = '[services.t]\nkind = "trainer"\nmodel_name = "local/tiny"\n'
    file = tmp_path / "p.toml"
    file.write_text(trainer + COMMAND.format(name="b", console=STEP))
    with pytest.raises(ConfigError, match=r"services\.b\.console: .*services\.t \(a trainer always writes it\)"):
        load(str(file))
