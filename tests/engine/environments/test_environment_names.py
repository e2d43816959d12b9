"""Which environment a group is from, by a name that outlives restarts: in the trainer, its journal and its records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from rollout_fakes import ENVIRONMENT, REGISTRATION, group, served_api
from training import ListedSource, ListeningBridge, made_up_groups, settings, small_model

from grpo_engine.data.batching import make_batch
from grpo_engine.data.source import RolloutApiSource
from grpo_engine.errors import DataError
from grpo_engine.train.batch import metrics_by_environment, row_names
from grpo_engine.train.checkpointing.journal import Journal, JournalEntry
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.loop import train
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.train.recording.samples import spread_groups
from grpo_engine.train.resumable import decisive_settings
from grpo_engine.wire.checkpoints import JournalHead
from grpo_engine.wire.metrics import MetricsLine, RolloutLine
from grpo_engine.wire.rollouts import ScoredGroup

NAMES = {0: "sort6", 1: "copy6", 2: "sort6"}
"""As after a restart of the first environment."""


def test_the_source_has_the_names_of_its_last_batch() -> None:
    with served_api() as url, RolloutApiSource(url) as source, httpx.Client(base_url=url, trust_env=False) as other:
        registration = {k: v for k, v in REGISTRATION.items() if not k.startswith("wandb")}
        source.register(**registration)
        assert source.poll() is None
        assert source.environments == {}
        other.post("/register-env", json={**ENVIRONMENT, "desired_name": "sort6"})
        other.post("/scored_data_list", json=[group(env_id=0), group(env_id=0), group(4)])
        assert source.next_batch(timeout_s=10) is not None
        assert source.environments == {0: "sort6"}
        assert source.next_batch(timeout_s=10) is not None
        assert source.environments == {}


def test_the_journal_keeps_names_and_reads_entries_from_before_there_were_any(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    head = JournalHead(step=1, policy_version=0, lease="a", environments=NAMES, settings={})
    journal.keep(JournalEntry(head=head, groups=made_up_groups(0)))
    [read] = journal.heads(after=0)
    assert read.environments == NAMES
    path = tmp_path / "journal/step_1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"environments":{"0":"sort6","1":"copy6","2":"sort6"},', b""))
    [read] = journal.heads(after=0)
    assert read.environments == {}


def groups_of(*env_ids: int | None) -> list[ScoredGroup]:
    return [made_up_groups(seed, groups=1)[0].model_copy(update={"env_id": id_}) for seed, id_ in enumerate(env_ids)]


def records(folder: Path, config: TrainConfig, *batches: list[ScoredGroup]) -> tuple[MetricsLine, list[RolloutLine]]:
    """The last line of the metrics of a run, and its sampled groups."""
    with Recorder(folder, total_steps=len(batches), show_times=False) as recorder:
        train(
            config,
            ListedSource(batches, NAMES),  # type: ignore[arg-type]
            ListeningBridge(small_model()),
            recorder,
            decode=lambda ids: " ".join(map(str, ids)),
            save_path=folder / "checkpoints",
        )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    groups = (folder / "rollouts.jsonl").read_text().splitlines()
    return MetricsLine.model_validate_json(lines[-1]), [RolloutLine.model_validate_json(line) for line in groups]


def test_sampled_groups_carry_the_name_of_their_environment_or_else_its_id(tmp_path: Path) -> None:
    config = settings(training_steps=1, rollouts_groups=4)
    _, groups = records(tmp_path, config, groups_of(0, 7, None, 2))
    assert [line.environment for line in groups] == ["sort6", "7", None, "sort6"]


def test_sampled_groups_come_from_all_environments_in_turn(tmp_path: Path) -> None:
    config = settings(training_steps=1, rollouts_groups=3)
    batch = groups_of(0, 2, 0, 1, 1)
    _, lines = records(tmp_path, config, batch)
    assert [line.environment for line in lines] == ["sort6", "sort6", "copy6"]
    assert [line.completions[0].reward for line in lines] == pytest.approx([batch[n].scores[0] for n in (0, 1, 3)])
    laid_out = make_batch(batch, seq_len=32)
    assert [spread_groups(laid_out, row_names(laid_out, NAMES), count) for count in (0, 1, 2, 4, 9)] == [
        [], [0], [0, 3], [0, 1, 3, 4], [0, 1, 2, 3, 4],
    ]  # fmt: skip


def test_a_step_of_several_environments_measures_each_of_them(tmp_path: Path) -> None:
    batch = groups_of(0, 1, 2)
    line, _ = records(tmp_path, settings(training_steps=1), batch)
    of_sort6 = [*batch[0].scores, *batch[2].scores]
    by_environment = {name: value for name, value in line.metrics.items() if "6" in name}
    assert by_environment == pytest.approx(
        {
            "reward/copy6/mean": sum(batch[1].scores) / 4,
            "rollout/copy6/num_groups": 1,
            "reward/sort6/mean": sum(of_sort6) / 8,
            "rollout/sort6/num_groups": 2,
        }
    )


def test_a_step_of_one_environment_has_no_metrics_by_environment(tmp_path: Path) -> None:
    line, _ = records(tmp_path, settings(training_steps=1), groups_of(0, 2))
    assert "reward/mean" in line.metrics
    assert not [name for name in line.metrics if "sort6" in name or name.count("/") > 1]
    assert metrics_by_environment(make_batch(groups_of(None, None), seq_len=32), NAMES) == {}


def test_a_step_replayed_from_the_journal_records_the_same_names(tmp_path: Path) -> None:
    config = settings(training_steps=1, rollouts_groups=2)
    whole, first = records(tmp_path / "whole", config, groups_of(0, 1, 2))
    head = JournalHead(step=1, policy_version=0, lease="", environments=NAMES, settings=decisive_settings(config))
    journal = Journal(tmp_path / "killed/checkpoints")
    journal.keep(JournalEntry(head=head, groups=groups_of(0, 1, 2)))
    again, second = records(tmp_path / "killed", config)
    assert [line.environment for line in second] == [line.environment for line in first] == ["sort6", "copy6"]
    assert again.metrics["reward/copy6/mean"] == whole.metrics["reward/copy6/mean"]
    assert again.metrics.keys() == whole.metrics.keys()


def strange(env_id: int | None) -> ScoredGroup:
    """A group of another model's tokenizer, which is left out."""
    rows = {"tokens": [[5, 99_999]] * 4, "masks": [[-100, 99_999]] * 4, "inference_logprobs": [[1.0, -1.0]] * 4}
    [group] = groups_of(env_id)
    return group.model_copy(update={**rows, "policy_versions": None})


def without_logprobs(env_id: int | None) -> ScoredGroup:
    """A group that cannot even be read."""
    [group] = groups_of(env_id)
    return group.model_copy(update={"inference_logprobs": None})


@pytest.mark.parametrize(
    ("make", "fault"),
    [(strange, "token id 99999 is outside the model's vocabulary"), (without_logprobs, "no inference_logprobs")],
)
@pytest.mark.parametrize(
    ("env_id", "sender"),
    [
        (1, "environment 'copy6' (env_id 1)"),
        (7, "the environment with env_id 7"),
        (None, "an unnamed environment"),
    ],
    ids=["named", "not-named", "without-id"],
)
def test_a_skipped_group_is_reported_with_the_name_or_id_of_its_environment(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[int | None], ScoredGroup],
    fault: str,
    env_id: int | None,
    sender: str,
) -> None:
    records(tmp_path, settings(training_steps=1, rollouts_every=1), [*groups_of(0), make(env_id)])
    assert f"group dropped: group of {sender}: {fault}" in caplog.text


def test_a_batch_that_ends_a_run_names_its_environment_also_when_it_comes_from_the_journal(tmp_path: Path) -> None:
    config = settings(training_steps=1)
    with pytest.raises(
        DataError, match=r"^group of environment 'copy6' \(env_id 1\): token id 99999 is outside the model's vocabulary"
    ):
        records(tmp_path / "first", config, [strange(1)])
    head = JournalHead(step=1, policy_version=0, lease="", environments=NAMES, settings=decisive_settings(config))
    Journal(tmp_path / "again/checkpoints").keep(JournalEntry(head=head, groups=[strange(1)]))
    with pytest.raises(
        DataError, match=r"^group of environment 'copy6' \(env_id 1\): token id 99999 is outside the model's vocabulary"
    ):
        records(tmp_path / "again", config)
