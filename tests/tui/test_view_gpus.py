"""GPU memory over a run, the plan, and the likely cause of out-of-memory: pure functions, worked out by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from screen_fakes import GIB, gpu, run_status, service

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.supervisor import GpuStatus, ServiceState, Snapshot, UsageSampled
from grpo_tui.view.gpus import reader
from grpo_tui.view.gpus import state as gpu_view
from grpo_tui.view.gpus.history import laid_out, means, peaks
from grpo_tui.view.gpus.reader import read_memory_plan, read_samples
from grpo_tui.view.gpus.rules import blame, compared, growth, memory_plan, planned_on
from grpo_tui.view.gpus.state import (
    MAX_MOMENTS,
    NUM_OLD,
    OTHERS,
    RECENT_MOMENTS,
    UNKNOWN_HOLDER,
    GpuMoment,
    GpuView,
    MemoryPlan,
    PastRead,
    SpanTurned,
    after,
    moment_of,
    moments_until,
    sampled,
)
from grpo_tui.view.state import ViewState, reduce

PROFILE: dict[str, Any] = {
    "services": {
        "vllm": {"kind": "inference", "engine": "vllm", "device": "cuda", "gpu_memory_utilization": 0.3, "gpus": [0]},
        "trainer": {"kind": "trainer", "micro_batch_tokens": 4096, "seq_len": 2048, "gpus": [0]},
        "api": {"kind": "rollout_api", "gpus": []},
    }
}
VLLM, TRAINER = service("vllm"), service("trainer")


def on_gpu(vllm: int = 0, trainer: int = 0, others: int = 0, **changes: Any) -> GpuStatus:
    """An 80 GB GPU; arguments in GiB."""
    held = {name: size * GIB for name, size in (("vllm", vllm), ("trainer", trainer)) if size}
    values: dict[str, Any] = {
        "memory_used_bytes": (vllm + trainer + others) * GIB,
        "by_service": held,
        "other_bytes": others * GIB,
        **changes,
    }
    return gpu().model_copy(update=values)


def sample(time: float, *gpus: GpuStatus, **rss: int) -> UsageSampled:
    return UsageSampled(
        number=int(time), time=time, cpu_percent={}, rss_bytes=rss, gpu_memory_bytes={}, gpus=list(gpus)
    )


def moments(*samples: UsageSampled) -> list[GpuMoment]:
    return [moment_of(each) for each in samples]


# --- history ---------------------------------------------------------------------------------------------------------


def test_each_sample_is_remembered_with_what_every_holder_has() -> None:
    state = reduce(ViewState(run_folder=Path("r"), now=0), Snapshot(number=0, status=run_status()))
    state = reduce(state, sample(5, on_gpu(vllm=24, trainer=10, others=3), vllm=7))
    [moment] = state.gpus.moments
    assert moment.gpus[0].by_holder == {"vllm": 24 * GIB, "trainer": 10 * GIB, OTHERS: 3 * GIB}
    assert moment.rss_bytes == {"vllm": 7}


def test_unassigned_memory_has_an_unknown_holder_and_stale_figures_are_left_out() -> None:
    figures = moment_of(sample(1, on_gpu(vllm=0, others=9, other_bytes=None, are_shares_known=False))).gpus[0]
    assert figures.by_holder == {UNKNOWN_HOLDER: 9 * GIB}
    assert moment_of(sample(1, on_gpu(vllm=24, stale_s=7.0))).gpus == ()


def test_a_day_of_samples_is_bounded_keeps_its_newest_one_by_one_and_its_peak() -> None:
    seen = GpuView()
    for second in range(4_000):
        seen = sampled(seen, sample(second, on_gpu(vllm=70 if second == 1000 else 24)))
    assert len(seen.moments) <= MAX_MOMENTS
    assert [each.time for each in seen.moments[-RECENT_MOMENTS:]] == list(range(4_000 - RECENT_MOMENTS, 4_000))
    assert seen.moments[0].time < 100
    assert max(each.fullness for each in seen.moments) == 70 * GIB
    gaps = [later.time - earlier.time for earlier, later in itertools.pairwise(seen.moments)]
    assert max(gaps) <= 4 * 4_000 / NUM_OLD


def test_history_stays_in_order_when_the_clock_is_set_back_or_earlier_samples_are_read() -> None:
    seen = GpuView()
    for time in (10, 11, 12, 11):
        seen = sampled(seen, sample(time, on_gpu(vllm=time)))
    assert [each.time for each in seen.moments] == [10, 11]
    seen = after(seen, PastRead(samples=(sample(4, on_gpu(vllm=1)), sample(7, on_gpu(vllm=2)), sample(10, on_gpu()))))
    assert [each.time for each in seen.moments] == [4, 7, 10, 11]
    assert seen.moments[2].fullness == 10 * GIB
    assert [each.time for each in moments_until(seen, 8.0)] == [4, 7]


def test_the_span_cycles_from_the_whole_run_to_a_minute() -> None:
    seen, spans = GpuView(), []
    for _ in range(5):
        spans.append(seen.span_s)
        seen = after(seen, SpanTurned())
    assert spans == [None, 3600.0, 600.0, 60.0, None]


def test_samples_are_read_from_a_timeline_past_damage_and_half_a_last_line(tmp_path: Path) -> None:
    lines = [to_line(sample(time, on_gpu(vllm=time))) for time in range(1, 9)]
    lines.insert(3, b'{"type":"usage", garbage\n')
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines)[:-20])
    assert [each.time for each in read_samples(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert [each.time for each in read_samples(tmp_path, most=3)] == [1, 6]
    assert read_samples(tmp_path / "missing") == ()


# --- columns ---------------------------------------------------------------------------------------------------------


def test_columns_have_round_seconds_and_do_not_move_while_the_run_goes_on() -> None:
    seen = moments(*(sample(100 + second, on_gpu(vllm=1)) for second in range(70)))
    columns = laid_out(seen, 20)
    assert (columns.column_s, columns.start, columns.end) == (4, 100, 172)
    assert laid_out(seen[:-5], 20).moments[:16] == columns.moments[:16]


def test_in_a_short_run_columns_are_several_cells_wide() -> None:
    seen = moments(*(sample(second, on_gpu(vllm=1)) for second in range(0, 100, 2)))
    columns = laid_out(seen, 180)
    assert (columns.column_s, columns.cells, columns.end) == (2, 3, 100)
    assert [moment.time for column in columns.moments[:7] for moment in column] == [0, 0, 0, 2, 2, 2, 4]
    assert len(laid_out(seen[:1], 180).moments) == 4  # a first sample does not fill the screen


def test_a_column_shows_the_peak_of_memory_and_the_mean_of_the_rest() -> None:
    seen = moments(
        *(
            sample(second, on_gpu(vllm=1 + second % 2, utilization_percent=50.0 * (second % 2)))
            for second in range(0, 40)
        )
    )
    columns = laid_out(seen, 10)
    fullest = peaks(columns.moments, lambda moment: moment.fullness)
    assert {moment.fullness for moment in fullest if moment} == {2 * GIB}
    busy = means(columns.moments, lambda moment: moment.gpus[0].utilization_percent)
    assert busy[0] == pytest.approx(25, abs=5)


def test_a_pause_between_samples_is_bridged_and_a_gap_is_not() -> None:
    columns = laid_out(moments(sample(0, on_gpu(vllm=1)), sample(4, on_gpu(vllm=1)), sample(40, on_gpu(vllm=1))), 21)
    is_known = [bool(column) for column in columns.moments]
    assert columns.column_s == 2
    assert all(is_known[:10])
    assert not any(is_known[10:20])
    assert is_known[20]


def test_a_span_shows_the_end_alone() -> None:
    columns = laid_out(moments(*(sample(second, on_gpu(vllm=1)) for second in range(500))), 30, 60.0)
    assert columns.end >= 500
    assert columns.start >= 500 - 60 - columns.column_s
    assert laid_out([], 30).moments == ()


# --- the plan --------------------------------------------------------------------------------------------------------


def test_the_plan_is_what_the_resolved_profile_gives_vllm_of_each_gpu(tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text(json.dumps(PROFILE))
    plan = read_memory_plan(tmp_path)
    assert planned_on(gpu(0), plan) == {"vllm": 24 * GIB}
    assert planned_on(gpu(1), plan) == {}
    assert plan.remedies["vllm"] == "--gpu-memory-utilization (now 0.3)"
    assert plan.remedies["trainer"] == "--micro-batch-tokens (now 4096), or set --gradient-checkpointing"


def test_a_plan_in_gigabytes_is_the_same_on_every_card() -> None:
    plan = memory_plan({"services": {"trainer": {"kind": "trainer", "gpus": [0], "gpu_memory_gb": 20.0}}})
    assert planned_on(gpu(0), plan) == {"trainer": 20 * 10**9}


def test_a_cache_of_a_fixed_size_has_no_share_and_another_flag() -> None:
    vllm = {**PROFILE["services"]["vllm"], "kv_cache_memory_bytes": 4 << 30}
    plan = memory_plan({"services": {"vllm": vllm}})
    assert (plan.shares, plan.remedies) == ({}, {"vllm": "--kv-cache-memory-bytes (now 4.0G)"})


def test_used_memory_is_compared_with_the_plan() -> None:
    assert compared(24 * GIB, 24 * GIB + (1 << 29), 80 * GIB) == "it uses 24.5G, as planned"
    assert compared(24 * GIB, 36 * GIB, 80 * GIB) == "it uses 36.0G, 12.0G more"
    assert compared(24 * GIB, 10 * GIB, 80 * GIB) == "it uses 10.0G, 14.0G less"
    assert compared(24 * GIB, None, 80 * GIB) == "its use is unknown"


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '{"services": 3}', '{"services": {"a": 1, "b": {"gpus": 3}}}', "\0"]
)
def test_a_resolved_profile_that_is_missing_or_damaged_plans_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "resolved.json").write_text(text)
    plan = read_memory_plan(tmp_path)
    assert (plan.shares, plan.remedies) == ({}, {})
    assert plan.note or (text is not None and '"b"' in text)


# --- likely cause ----------------------------------------------------------------------------------------------------


def test_the_service_that_grew_last_and_the_one_that_holds_most_are_named() -> None:
    seen = moments(sample(0, on_gpu(vllm=40, trainer=10)), sample(30, on_gpu(vllm=40, trainer=14)))
    grown = growth(seen, 0)
    assert grown is not None
    assert (grown.holder, grown.num_bytes, grown.over_s) == ("trainer", 4 * GIB, 30)
    found = blame(on_gpu(vllm=40, trainer=14), seen, [VLLM, TRAINER], memory_plan(PROFILE), {})
    assert found.text == "if it runs out of memory: trainer grew last (+4.0G in 30s), vllm holds most (40.0G)"
    assert found.hint.startswith("for trainer lower --micro-batch-tokens (now 4096)")
    assert "for vllm lower --gpu-memory-utilization (now 0.3)" in found.hint
    assert not found.has_happened


def test_old_growth_and_noise_do_not_count() -> None:
    old = sample(0, on_gpu(vllm=1))
    seen = moments(old, sample(1000, on_gpu(vllm=40)), sample(1100, on_gpu(vllm=40)))
    assert growth(seen, 0) is None
    assert growth(seen, 7) is None
    assert growth([], 0) is None


def test_a_crash_is_reported_with_what_each_service_held_before_and_the_flag() -> None:
    why = "exit code 1; last lines:\n  torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 …"
    victim = service("trainer", state=ServiceState.FAILED, why=why, gpus=[0])
    seen = moments(
        sample(100, on_gpu(vllm=36, trainer=40, others=3)),
        sample(110, on_gpu(vllm=36, others=3)),
    )
    found = blame(on_gpu(vllm=36, others=3), seen, [VLLM, victim], memory_plan(PROFILE), {"trainer": 109.0})
    assert found.has_happened
    assert "trainer ran out of memory" in found.text
    assert "asking for 2.00 GiB more" in found.text
    assert "trainer held 40.0G, vllm held 36.0G, processes outside this run held 3.0G, 1.0G were free" in found.text
    assert found.hint.startswith("move to other GPUs")
    assert "for trainer lower --micro-batch-tokens" in found.hint


def test_the_out_of_memory_message_of_our_trainer_is_recognised() -> None:
    why = "exit code 1: the GPU's memory ran out in step 4, with …: 2.1 GB more were asked for; of the 85 GB"
    victim = service("trainer", state=ServiceState.FAILED, why=why, gpus=[0])
    found = blame(on_gpu(), moments(sample(1, on_gpu(trainer=70))), [VLLM, victim], MemoryPlan(), {})
    assert "asking for 2.1 GB more; just before, trainer held 70.0G, 10.0G were free" in found.text
    assert found.hint == "for trainer lower --batch-size or --seq-len"


def test_without_known_shares_or_use_no_service_is_named_and_a_crash_on_another_gpu_is_left_out() -> None:
    hidden = on_gpu(other_bytes=None, are_shares_known=False, memory_used_bytes=60 * GIB)
    found = blame(hidden, moments(sample(1, hidden)), [VLLM, TRAINER], memory_plan(PROFILE), {})
    assert "use by process is unknown" in found.text
    assert "--gpu-memory-utilization" in found.hint
    found = blame(on_gpu(), moments(sample(1, on_gpu())), [VLLM], MemoryPlan(), {})
    assert (found.text, found.hint) == ("if it runs out of memory: no process uses any now", "")
    victim = service("trainer", state=ServiceState.FAILED, why="CUDA out of memory", gpus=[1])
    found = blame(on_gpu(vllm=36), moments(sample(1, on_gpu(vllm=36))), [VLLM, victim], MemoryPlan(), {})
    assert not found.has_happened


def test_the_history_is_part_of_the_one_state() -> None:
    state = reduce(ViewState(run_folder=Path("r"), now=0), Snapshot(number=0, status=run_status()))
    assert reduce(state, SpanTurned()).gpus.span_s == 3600.0
    assert reduce(state, gpu_view.CommandsTurned()).gpus.has_whole_commands


def test_a_line_of_a_timeline_is_not_read_beyond_the_limit_of_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "events.jsonl").write_bytes(line := to_line(sample(1, on_gpu(vllm=1))))
    monkeypatch.setattr(reader, "MAX_BYTES", len(line) - 2)
    assert read_samples(tmp_path) == ()


def test_a_gpu_among_thousands_is_found_without_looking_at_each() -> None:
    """A cluster of 64 machines with 8 GPUs each took 12 s to open."""
    many = [gpu(index=index) for index in reversed(range(4000))]
    moment = moment_of(sample(1.0, *many))
    assert all(moment.gpu(index) is not None for index in range(4000))
    assert moment.gpu(4000) is None
