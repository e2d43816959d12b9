"""Runs on paper whose results can be worked out by hand, and the reading of recorded ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_engine.errors import ConfigError
from grpo_engine.rollouts.state.buffering import Buffering
from grpo_engine.simulate import generation
from grpo_engine.simulate.clock import Clock
from grpo_engine.simulate.figures import BESIDE_SAMPLING, Batching, Figures, Lengths, ServerSpeed, TrainerSpeed
from grpo_engine.simulate.generation import TooMany
from grpo_engine.simulate.layout import Layout
from grpo_engine.simulate.recording import Recording, figures_of, measured_speed, read_recording
from grpo_engine.simulate.result import calibrated, run
from grpo_engine.simulate.servers import ContinuousServer, Request
from grpo_engine.simulate.stack import simulate
from grpo_engine.wire.run_folder import METRICS_FILE, ROLLOUTS_FILE

LAYOUT = Layout(
    num_servers=1,
    num_ranks=1,
    num_environments=1,
    batch_size=4,
    group_size=2,
    max_staleness=0,
    num_steps=10,
    num_warmup=4,
)


def figures(*, sample_s: float, train_s: float, update_s: float = 0.0, batching: Batching = "continuous") -> Figures:
    """A batch of 4 × 10 tokens takes `sample_s` to sample and `train_s` to train."""
    return Figures(
        server=ServerSpeed(points=((4, 40 / sample_s),), max_running=4, batching=batching),
        trainer=TrainerSpeed(tokens_per_s=40 / train_s),
        lengths=Lengths(groups=((10, 10),)),
        update_s=update_s,
    )


@pytest.mark.parametrize("batching", ["continuous", "whole"])
def test_in_turns_a_step_takes_the_sum_of_both_times(batching: Batching) -> None:
    result = run(LAYOUT, figures(sample_s=3, train_s=2, update_s=0.5, batching=batching))
    assert result.interval_s == pytest.approx(5.5)
    assert result.tokens_per_s == pytest.approx(40 / 5.5)
    assert result.trainer_waits == pytest.approx(3 / 5.5)
    assert result.generation_waits == pytest.approx(2.5 / 5.5)
    assert (result.staleness_mean, result.stalest) == (0, 0)


@pytest.mark.parametrize("batching", ["continuous", "whole"])
@pytest.mark.parametrize(("sample_s", "train_s"), [(3.0, 2.0), (2.0, 3.0)])
def test_one_batch_ahead_a_step_takes_the_longer_of_both_times(
    sample_s: float, train_s: float, batching: Batching
) -> None:
    given = figures(sample_s=sample_s, train_s=train_s, batching=batching)
    result = run(replace(LAYOUT, max_staleness=1), given)
    assert result.interval_s == pytest.approx(3.0)
    # An update waits for the end of a whole batch, and the trainer with it: that is no wait for groups.
    busy = train_s / 3 if batching == "continuous" else 1.0
    assert result.trainer_busy == pytest.approx(busy)
    assert result.stalest == 1


@pytest.mark.parametrize("batching", ["continuous", "whole"])
def test_a_step_takes_longer_while_servers_decode_on_the_device_of_the_trainer(batching: Batching) -> None:
    layout = replace(LAYOUT, shares_device=True)
    given = figures(sample_s=2, train_s=3, batching=batching)
    beside = replace(given, trainer=replace(given.trainer, beside_sampling=2.0))
    assert run(layout, beside).interval_s == pytest.approx(2 + 3)  # in turns nothing is decoded meanwhile
    # One batch ahead: 2 s of decoding take 1 s from the trainer.
    ahead = replace(layout, max_staleness=1)
    assert run(ahead, beside).interval_s == pytest.approx(4, rel=1e-3)
    assert run(replace(ahead, shares_device=False), beside).interval_s == pytest.approx(3)


def test_what_is_sampled_ahead_is_as_old_as_the_bound_where_training_is_slower() -> None:
    given = figures(sample_s=1, train_s=3)
    for bound in (0, 1, 2, 4):
        steps = simulate(replace(LAYOUT, max_staleness=bound, num_warmup=12), given)
        assert {step.staleness_max for step in steps} == {bound}


def test_a_full_window_drops_what_is_oldest() -> None:
    layout = replace(LAYOUT, max_staleness=None, max_batches_offpolicy=8)
    given = figures(sample_s=1, train_s=4)
    window = Buffering(kind="window", max_sequences=4)
    assert run(replace(layout, buffering=window), given).stalest <= 2 < run(layout, given).stalest


def test_two_servers_sample_twice_as_fast_and_two_ranks_train_twice_as_fast() -> None:
    given = figures(sample_s=3, train_s=2)
    assert run(replace(LAYOUT, num_ranks=2), given).interval_s == pytest.approx(4)
    # Each server has one of the two groups: half of the sequences, at a speed that is in proportion to them.
    flat = replace(given, server=ServerSpeed(points=((1, 40 / 3),), max_running=2))
    assert run(replace(LAYOUT, num_servers=1), flat).interval_s == pytest.approx(3 + 2)
    assert run(replace(LAYOUT, num_servers=2), flat).interval_s == pytest.approx(1.5 + 2)


def test_rewards_delay_a_batch_and_do_not_occupy_a_server() -> None:
    given = replace(figures(sample_s=3, train_s=2), reward_s=1.0)
    assert run(LAYOUT, given).interval_s == pytest.approx(6)


def test_the_longest_completion_of_a_whole_batch_is_waited_for() -> None:
    given = replace(figures(sample_s=3, train_s=2, batching="whole"), lengths=Lengths(groups=((5, 20),)))
    # 4 sequences at 40 tokens in 3 s: 0.3 s a token for all, 20 tokens; 50 tokens are trained at 20 a second.
    assert run(LAYOUT, given).interval_s == pytest.approx(0.3 * 20 + 50 / 20)


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    given = replace(figures(sample_s=3, train_s=2), lengths=Lengths(mean=10, longest=40))
    layout = replace(LAYOUT, max_staleness=2)
    assert simulate(layout, given) == simulate(layout, given)
    assert simulate(layout, given) != simulate(replace(layout, seed=1), given)


def record(folder: Path, *, sample_s: float, train_s: float, num_steps: int = 40) -> None:
    """The files of a run in turns: 4 sequences of 5 + 10 tokens, 0.25 s between two steps."""
    interval = sample_s + train_s + 0.5
    metrics = {
        "train/step_time": sample_s + train_s + 0.25,
        "train/data_fetch_time": sample_s,
        "train/sync_time": 0.25,
        "train/tokens_per_second": 60 / (sample_s + train_s + 0.25),
        "train/busy_fraction": (train_s + 0.25) / (sample_s + train_s + 0.25),
        "rollout/busy_fraction": (sample_s + 0.25) / interval,
        "rollout/length_mean": 10.0,
        "rollout/staleness_mean": 0.0,
        "rollout/staleness_max": 0.0,
    }
    lines = [
        json.dumps({"time": 1000 + interval * step, "step": step, "policy_version": step, "metrics": metrics})
        for step in range(1, num_steps + 1)
    ]
    (folder / METRICS_FILE).write_text("\n".join([*lines, "not json"]))
    group = {"completions": [{"token_ids": [1] * 10}] * 2}
    (folder / ROLLOUTS_FILE).write_text(json.dumps(group) + "\n")


@pytest.mark.parametrize("assumed", [1.0, 5000.0])
def test_a_recording_is_simulated_as_it_was_and_predicts_another_bound(tmp_path: Path, assumed: float) -> None:
    record(tmp_path, sample_s=3, train_s=2)
    recording = read_recording(tmp_path)
    shape = ServerSpeed(points=((4, assumed),), max_running=4, batching="whole")
    given = calibrated(recording, LAYOUT, figures_of(recording, shape, num_ranks=1, batch_size=4))
    assert given.lengths.prompt == 5
    assert run(LAYOUT, given).interval_s == pytest.approx(5.5, rel=0.02)
    assert run(replace(LAYOUT, max_staleness=1), given).interval_s == pytest.approx(3.25, rel=0.1)


def test_a_recording_beside_sampling_says_how_fast_the_trainer_is_alone(tmp_path: Path) -> None:
    record(tmp_path, sample_s=3, train_s=2)
    by_turns = read_recording(tmp_path)
    beside = replace(by_turns, staleness_max=1.0, generation_busy=1.0)
    shape = ServerSpeed(points=((4, 1.0),))

    def step_s(recording: Recording, *, shares_device: bool) -> float:
        given = figures_of(recording, shape, num_ranks=1, batch_size=4, shares_device=shares_device)
        return given.trainer.step_s(60, 1)

    assert step_s(by_turns, shares_device=True) == step_s(beside, shares_device=False) == pytest.approx(2.0)
    assert step_s(beside, shares_device=True) == pytest.approx(2 / BESIDE_SAMPLING)


def test_what_runs_at_an_update_is_computed_again_first() -> None:
    clock, answered = Clock(), []
    server = ContinuousServer(clock, ServerSpeed(points=((2, 20.0),), max_running=2, recomputed_per_s=60))
    server.submit(Request(lengths=(10, 10), on_answer=lambda request: answered.append(clock.now), prompt=20))
    clock.after(0.5, lambda: server.pause(lambda: server.resume(1)))  # 20 tokens of the prompt, and 5 of each
    clock.run_until(lambda: bool(answered))
    assert answered == [pytest.approx(1.5)]


@pytest.mark.parametrize(
    ("points", "speeds"),
    [
        ([(1, 100.0), (32, 1600.0)], {1: 100.0, 32: 1600.0, 128: 128 / (0.01 + 127 * 0.01 / 31)}),
        ([(30.0, 3000.0), (34.0, 3400.0)], {32: 3200.0, 64: 6400.0}),
        ([], {64: 64.0}),
    ],
    ids=["a line through the times of steps", "too close to each other: the form", "none: the form"],
)
def test_the_speed_that_servers_measured_is_simulated(
    tmp_path: Path, points: list[tuple[float, float]], speeds: dict[int, float]
) -> None:
    listed = [{"sequences": count, "tokens_per_s": speed, "num_steps": 20} for count, speed in points]
    measured = {"points": listed, "recomputed_tokens": 1000, "recomputed_s": 0.5}
    (tmp_path / "vllm.speeds.json").write_text(json.dumps(measured))
    (tmp_path / "vllm-2.speeds.json").write_text("damaged")
    server = measured_speed(tmp_path, ServerSpeed(points=((1, 1.0), (128, 128.0)), max_running=128))
    assert {count: server.tokens_per_s(count) for count in speeds} == pytest.approx(speeds)
    assert server.recomputed_per_s == 2000


def test_a_recording_without_steps_or_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: No such file"):
        read_recording(tmp_path)
    record(tmp_path, sample_s=3, train_s=2, num_steps=5)
    with pytest.raises(ConfigError, match="speeds need at least 8"):
        read_recording(tmp_path)
    record(tmp_path, sample_s=3, train_s=2)
    (tmp_path / ROLLOUTS_FILE).write_text("")
    with pytest.raises(ConfigError, match="no groups, so no lengths"):
        read_recording(tmp_path)


def test_sampling_ahead_ends_where_a_simulation_has_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MOST_SEQUENCES", 40)
    given = figures(sample_s=1, train_s=1000)
    assert run(replace(LAYOUT, max_staleness=4), given).stalest == 4
    with pytest.raises(TooMany, match="more than 40 sequences are sampled ahead"):
        run(replace(LAYOUT, max_staleness=20), given)
