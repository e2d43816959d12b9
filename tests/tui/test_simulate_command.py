"""`grpo-tui simulate`: its rows, what it says of them, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.simulate.generation import MOST_SEQUENCES, TooMany
from grpo_engine.simulate.layout import Layout
from grpo_engine.simulate.result import Result
from grpo_tui.cli import simulate
from grpo_tui.cli.simulate import simulate_command
from grpo_tui.profile.loading import load
from grpo_tui.profile.simulated import assumed_figures
from grpo_tui.view.simulation import Simulated, advice, best_of, rows_of
from grpo_tui.view.simulation_picture import to_svg


def simulated(bound: int | None, tokens_per_s: float, *, trainer_busy: float = 1.0, busy: float = 1.0) -> Simulated:
    layout = Layout(
        num_servers=2, num_ranks=1, num_environments=1, batch_size=4, group_size=2, max_staleness=bound
    )  # fmt: skip
    result = Result(
        layout=layout,
        interval_s=2.0,
        tokens_per_s=tokens_per_s,
        sequences_per_s=2.0,
        trainer_busy=trainer_busy,
        generation_busy=busy,
        staleness_mean=float(bound or 0),
        staleness_max=float(bound or 0),
        stalest=bound or 0,
        dropped_per_step=0.0,
    )
    return Simulated(result=result)


def test_the_least_staleness_that_is_nearly_as_fast_as_the_fastest_is_recommended() -> None:
    rows = [simulated(0, 60.0), simulated(1, 98.0), simulated(4, 100.0)]
    assert best_of(rows) is rows[1]
    assert advice(rows, 4)[0] == "max_staleness 1 suffices: 98 tokens/s, and the fastest has 100; the profile has 4"
    assert advice(rows, None)[0].endswith("; the profile leaves it unset")


def test_the_slower_side_is_named_with_how_much_faster_it_must_be() -> None:
    lines = advice([simulated(1, 100.0, trainer_busy=0.5)], 1)
    assert lines[0].startswith("1 trainer rank : 2 servers: the trainer waits for groups 50% of the time")
    assert "generation is the slower side, and would keep up if it were 2.0 times as fast" in lines[0]


def test_where_neither_side_waits_for_long_it_says_so_and_how_long() -> None:
    lines = advice([simulated(1, 100.0, trainer_busy=0.75, busy=0.875)], 1)
    waits = "the trainer waits for groups 25% of the time, and environments for it 12%"
    assert lines == [f"1 trainer rank : 2 servers: {waits}: neither for long"]
    assert advice([simulated(1, 100.0, trainer_busy=0.5, busy=0.8)], 1)[0].endswith(
        "50% of the time, and environments for it 20%"
    )


def test_a_table_without_machines_has_no_column_for_them() -> None:
    head, row = rows_of([simulated(None, 1234.0, busy=0.75)])
    assert head[0] == "trainer ranks"
    assert row[2:] == ("unset", "2", "1,234", "0%", "25%", "0.00", "0", "0")


def test_the_picture_has_a_row_for_each_and_escapes_the_name() -> None:
    picture = to_svg("a<b", [simulated(0, 60.0), simulated(1, 98.0)])
    assert picture.count("tokens/s, staleness") == 2
    assert "a&lt;b: simulated" in picture


def test_machines_divide_their_gpus_between_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"machines": "1,2", "gpus_per_machine": 4, "steps": 5, "environments": 3, "as_json": True}
    with pytest.raises(GrpoError, match=r"p\.svg cannot be written: No such file or directory"):
        simulate_command("llama8b-broadcast", svg=tmp_path / "none" / "p.svg", **options)
    simulate_command("llama8b-broadcast", **options)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["trainer_ranks"] + row["servers"] for row in rows] == [4, 8]
    assert all(row["environments"] == 3 and row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.parametrize(("profile", "is_shared"), [("llama8b-random", True), ("llama8b-broadcast", False)])
def test_gpus_that_trainer_and_server_share_are_said(
    profile: str, is_shared: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate_command(profile, max_staleness="1", steps=5)
    assert ("share GPUs: a step is taken to last 1.41 times as" in capsys.readouterr().err) == is_shared


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("max_staleness", "1,x", "--max-staleness 1,x: numbers separated by commas"),
        ("machines", "0", "--machines 0: numbers separated by commas"),
        ("server_speed", "8:100,1:10", "rising numbers of sequences"),
        ("server_speed", "fast", "write it like 1:202"),
        ("trainers", 2, "go with --machines"),
    ],
)
def test_a_wrong_option_is_refused_by_name(option: str, value: object, says: str) -> None:
    with pytest.raises(typer.BadParameter, match=says):
        simulate_command("llama8b-broadcast", **{option: value})  # type: ignore[arg-type]


def test_a_profile_without_measured_speed_needs_a_recording(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run the profile once and name its folder, --from"):
        simulate_command("tiny-cpu")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        simulate_command("tiny-cpu", from_=str(tmp_path))


def test_a_profile_that_has_no_end_of_sampling_ahead_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "SIMULATED_WITHIN_S", 0.2)
    with pytest.raises(GrpoError, match=r"not simulated within 0\.2 s \(with max_staleness 1000000000, \d+ of"):
        simulate_command("llama8b-broadcast", ["services.trainer.max_staleness=1000000000"], max_staleness="1000000000")


def test_more_steps_that_are_asked_for_have_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "SIMULATED_WITHIN_S", 1e-9)
    with pytest.raises(GrpoError, match=r"not simulated within 2e-09 s"):
        simulate_command("llama8b-broadcast", steps=80)


def test_batches_for_which_a_simulation_has_no_room_are_refused() -> None:
    with pytest.raises(TooMany, match="more than 262,144 sequences are sampled ahead of the trainer"):
        simulate_command("llama8b-broadcast", ["services.trainer.batch_size=65537"])


def test_a_server_for_a_billion_sequences_takes_no_more_memory_than_there_are() -> None:
    loaded = load("llama8b-broadcast", ["services.vllm.max_batch_size=1000000000"])
    assert len(assumed_figures(loaded).server.rates()) == MOST_SEQUENCES + 1


@pytest.mark.parametrize("service", ["api", "trainer"])
def test_a_staleness_that_no_message_can_say_is_refused_by_name(service: str) -> None:
    with pytest.raises(ConfigError, match=rf"services\.{service}\.max_staleness"):
        load("llama8b-broadcast", [f"services.{service}.max_staleness={2**62}"])
