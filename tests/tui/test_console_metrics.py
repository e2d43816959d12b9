"""What a program prints becomes steps: with the lines of the stock trainer, and of other programs."""

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
    append_lines,
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
    """The table of the profile of the package."""
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
    """Every step of a program that has exited."""
    return [record for line in lines for record in reader.read(line)] + reader.end()


def read_stock(lines: Iterable[str], messages: list[str] | None = None) -> list[StepRecord]:
    """Every step of the stock trainer."""
    report = [].append if messages is None else messages.append
    return read_all(StepReader(stock_console(), report=report), lines)


def steps_and_metrics(records: Iterable[StepRecord]) -> list[tuple[int, dict[str, float]]]:
    return [(record.step, dict(record.metrics)) for record in records]


# --- the stock trainer ---------------------------------------------------------------------------------------------


def test_every_number_of_a_stock_step_gets_the_name_it_has_in_a_run_folder() -> None:
    (record,) = read_stock(STOCK_STEP)
    assert (record.step, record.policy_version) == (3, 3)
    assert record.metrics == pytest.approx(STOCK_METRICS)


@pytest.mark.parametrize(
    ("lines", "metrics"),
    [
        (["  Loss: 0.1234, Grad norm: 0.4506", "    GRPO: ratio=0.998, clipped=0.0%"],
         {"train/loss": 0.1234, "train/grad_norm": 0.4506, "grpo/mean_ratio": 0.998, "grpo/clipped_fraction": 0.0}),
        (["    [WARNING] ref_logprobs avg 0.850 (should be negative!)"], {"logprobs/inference_mean": 0.85}),
    ],
    ids=["without a benchmark", "misaligned logprobs"],
)  # fmt: skip
def test_a_stock_step_has_only_the_metrics_that_it_printed(lines: list[str], metrics: dict[str, float]) -> None:
    assert steps_and_metrics(read_stock(["Step 1/2", *lines])) == [(1, metrics)]


def test_other_lines_of_the_stock_trainer_measure_nothing() -> None:
    lines = """
    [Data] ⚠ inference_logprobs key exists but is empty!
    [WARNING] This suggests inference_logprobs alignment is wrong
  [SINGLE-COPY] Weights updated in-place - step 4
  Saving checkpoint to /x/step_4...
  [LORA] ✗ Hot-swap failed: step_4
  [LORA] ✓ Hot-swapped adapter via custom API: final
  [RESTART] vLLM restarted in 45.0s
  GPU memory: 3 GB
Training for 30 steps on cuda
Training finished.
    Avg step time:         0.27s
    Peak GPU memory:       11.00 GB
""".splitlines()
    assert read_stock(["Step 1/30", *lines]) == []


def test_a_policy_version_counts_only_when_the_server_has_loaded_it() -> None:
    lines = ["Step 1/9", "  Loss: 0.1, Grad norm: 0.4", "  [LORA] ✗ Hot-swap failed: busy", "Step 2/9"]
    lines += ["  [LORA] ✓ Hot-swapped adapter: step_2", "  Loss: 0.1, Grad norm: 0.4", "Step 3/9"]
    lines += ["  Loss: 0.2, Grad norm: 0.4"]
    assert [(record.step, record.policy_version) for record in read_stock(lines)] == [(1, 0), (2, 2), (3, 2)]


def test_without_a_pattern_for_the_policy_version_it_is_the_step() -> None:
    assert [record.policy_version for record in read_all(reader(), ["Step 7", "Loss: 1"])] == [7]


def test_nan_is_left_out_and_reported_once() -> None:
    messages: list[str] = []
    lines = ["Step 7/9", "  Loss: nan, Grad norm: inf", "    GRPO: ratio=1.000, clipped=nan%"]
    lines += ["Step 8/9", "  Loss: nan, Grad norm: 0.5000", "    GRPO: ratio=1.000, clipped=0.0%"]
    assert steps_and_metrics(read_stock(lines, messages)) == [
        (7, {"grpo/mean_ratio": 1.0}),
        (8, {"train/grad_norm": 0.5, "grpo/mean_ratio": 1.0, "grpo/clipped_fraction": 0.0}),
    ]
    assert messages == [
        f"{name} is {value} at step 7: left out of the metrics (reported once)"
        for name, value in (("train/loss", "nan"), ("train/grad_norm", "inf"), ("grpo/clipped_fraction", "nan"))
    ]


# --- when a step is complete -----------------------------------------------------------------------------------------


def read_and_settle(steps: StepReader, *lines: str) -> list[StepRecord]:
    """Read lines; what the second of two pauses without a new value completes."""
    for line in lines:
        steps.read(line)
    assert steps.settle() == []
    return steps.settle()


def test_a_step_is_returned_when_the_next_one_opens() -> None:
    steps = reader()
    assert [*steps.read("Step 1"), *steps.read("Loss: 0.5")] == []
    assert steps_and_metrics(steps.read("Step 2")) == [(1, {"loss": 0.5})]


def test_a_step_without_new_values_is_returned_before_the_next_one_opens() -> None:
    steps = reader()
    settled = read_and_settle(steps, "Step 1", "Loss: 0.5", "ratio=1.0")
    assert steps_and_metrics(settled) == [(1, {"loss": 0.5, "ratio": 1.0})]
    assert steps.settle() == steps.read("Step 2") == []


def test_a_step_waits_for_the_metrics_of_the_step_before_it() -> None:
    steps = reader()
    assert read_and_settle(steps, "Step 1", "Loss: 0.5", "ratio=1.0", "Step 2", "Loss: 0.4") == []
    assert steps_and_metrics(read_and_settle(steps, "ratio=0.9")) == [(2, {"loss": 0.4, "ratio": 0.9})]


def test_an_occasional_metric_does_not_delay_steps_without_it() -> None:
    settled = read_and_settle(
        reader(), "Step 1", "Loss: 0.5", "ratio=1.0", "Step 2", "Loss: 0.4", "Step 3", "Loss: 0.3"
    )
    assert steps_and_metrics(settled) == [(3, {"loss": 0.3})]


def test_late_values_return_the_whole_step_again() -> None:
    steps = reader()
    assert steps_and_metrics(read_and_settle(steps, "Step 1", "Loss: 0.5")) == [(1, {"loss": 0.5})]
    steps.read("ratio=1.0")
    assert steps_and_metrics(steps.end()) == [(1, {"loss": 0.5, "ratio": 1.0})]


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        (["Step 1", "Loss: 0.5", "Loss: 0.4"], [(1, {"loss": 0.4})]),
        (["Step 1 Loss: 0.5 ratio=1", "Step 2 Loss: 0.4 ratio=1"],
         [(1, {"loss": 0.5, "ratio": 1.0}), (2, {"loss": 0.4, "ratio": 1.0})]),
        (["Step 1", "Step 2", "Loss: 1", "Step 3"], [(2, {"loss": 1.0})]),
        (["\x1b[1mStep 1\x1b[0m", "\x1b[2K\x1b[32mLoss: 0.5\x1b[0m"], [(1, {"loss": 0.5})]),
        (["Step 1", "took 5 ms"], []),
        (["Step 1", "took 5 ms, 3k/s"], [(1, {"rate": 3000.0})]),
    ],
    ids=["the later of two values counts", "step and values on one line", "a step without values", "colours",
         "an optional group that does not match", "a scale"],
)  # fmt: skip
def test_lines_become_steps(lines: list[str], steps: list[tuple[int, dict[str, float]]]) -> None:
    console = {name: ConsoleMetric(pattern=pattern) for name, pattern in LOSS_AND_RATIO.items()}
    console["rate"] = ConsoleMetric(pattern=r"took \d+ ms(?:, (\d+)k/s)?", scale=1000)
    assert steps_and_metrics(read_all(StepReader(console, report=[].append), lines)) == steps


@pytest.mark.parametrize(
    ("lines", "steps", "message"),
    [
        (["Step 1", "Loss: 0.5,"], [(1, {})],
         "loss is '0.5,', which is not a number at step 1: narrow the first group of its pattern (reported once)"),
        (["step: 1", "Loss: 0.5"], [],
         "loss printed without a step, so not kept: no line matched step = '^Step (\\\\d+)'; correct that pattern"),
    ],
    ids=["not a number", "no step"],
)  # fmt: skip
def test_a_pattern_that_is_wrong_is_reported(
    lines: list[str], steps: list[tuple[int, dict[str, float]]], message: str
) -> None:
    messages: list[str] = []
    assert steps_and_metrics(read_all(reader(messages=messages), lines)) == steps
    assert messages == [message]


# --- a successor -----------------------------------------------------------------------------------------------------

LOG = [line for step in range(1, 6) for line in (f"Step {step}", f"Loss: {step / 10}", f"ratio={step}")]
ALL = [(step, {"loss": step / 10, "ratio": float(step)}) for step in range(1, 6)]


def written(*given: tuple[int, dict[str, float]]) -> WrittenSteps:
    step, metrics = given[-1]
    last = MetricsLine(time=0.0, step=step, policy_version=step, metrics=metrics)
    return WrittenSteps(steps=tuple(step for step, _ in given), last=last)


@pytest.mark.parametrize(
    ("earlier", "log", "unwritten"),
    [
        *((ALL[:num], LOG, ALL[num:]) for num in (1, 2, 3, 4)),
        ([*ALL[:2], (3, {"loss": 0.3})], LOG, ALL[2:]),
        (ALL[:4], LOG[7:], ALL[4:]),
        ([*ALL, *ALL[:2]], [*LOG, *LOG], ALL[2:]),
    ],
    ids=["1", "2", "3", "4", "a step written in part", "older half of the log dropped", "steps count from 1 again"],
)
def test_a_successor_returns_only_unwritten_steps(
    earlier: list[tuple[int, dict[str, float]]], log: list[str], unwritten: list[tuple[int, dict[str, float]]]
) -> None:
    assert steps_and_metrics(read_all(reader(written=written(*earlier)), log)) == unwritten


def test_a_successor_keeps_the_policy_that_was_handed_over() -> None:
    patterns = {**LOSS_AND_RATIO, "policy_version": r"policy (\d+)"}
    last = MetricsLine(time=0.0, step=2, policy_version=1, metrics={"loss": 0.2})
    successor = reader(patterns, written=WrittenSteps(steps=(2,), last=last))
    assert [record.policy_version for record in read_all(successor, ["Step 3", "Loss: 0.3"])] == [1]


def test_a_line_cut_by_a_crash_leaves_the_others_readable(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    whole = json.dumps({"time": 1.0, "step": 1, "policy_version": 1, "metrics": {"loss": 0.5}})
    file.write_text(whole + "\n" + whole[:20])
    append_lines(file, whole.replace('"step": 1', '"step": 2').encode() + b"\n")
    assert written_steps(file, 0).steps == (1, 2)


def test_steps_of_an_earlier_attempt_are_not_counted(tmp_path: Path) -> None:
    file, line = tmp_path / "metrics.jsonl", '{"time": 1, "step": %d, "policy_version": 1, "metrics": {}}\n'
    file.write_text(line % 1 + line % 2)
    offset = marked_offset(tmp_path / "mark", file)
    with file.open("a") as more:
        more.write(line % 1)
    assert marked_offset(tmp_path / "mark", file) == offset
    assert written_steps(file, offset).steps == (1,)


# --- profiles ------------------------------------------------------------------------------------------------------

STEP = r"{ step = '^Step (\d+)', loss = 'Loss: (\S+)' }"


def command(name: str, console: str) -> str:
    return f'[services.{name}]\nkind = "command"\nargv = ["true"]\nconsole = {console}\n'


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (command("a", "{ loss = 'Loss: (.+)' }"), r"services\.a\.console: no pattern for 'step' among loss"),
        (command("a", STEP) + command("b", STEP),
         r"services\.b\.console: metrics\.jsonl has one writer, which is services\.a\.con"),
        ('[services.t]\nkind = "trainer"\nmodel_name = "local/tiny"\n' + command("b", STEP),
         r"services\.b\.console: .*services\.t \(a trainer always writes it\)"),
    ],
    ids=["no step", "two consoles", "console and trainer"],
)  # fmt: skip
def test_a_console_without_a_step_or_beside_another_writer_is_refused(
    tmp_path: Path, profile: str, message: str
) -> None:
    file = tmp_path / "p.toml"
    file.write_text(profile)
    with pytest.raises(ConfigError, match=message):
        load(str(file))
