"""The loop: what happens in which order, and that a run that was cut off goes on as if it had not been."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training import (
    VOCABULARY,
    ListedSource,
    ListeningBridge,
    made_up_groups,
    metrics_lines,
    scored_group,
    settings,
    small_model,
    train_in,
)

from grpo_engine.data.batching import Batch
from grpo_engine.errors import CheckpointError, DataError, PeerUnavailable
from grpo_engine.train.batch import trainable_batch
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.rehearsal import OutOfGpuMemory
from grpo_engine.train.recording.recorder import Recorder, console_lines
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.metrics import METRIC_NAMES, RolloutLine
from grpo_engine.wire.run_folder import CHECKPOINT_MARKER


def run(
    folder: Path,
    config: TrainConfig,
    *,
    first_batch: int = 0,
    batches: int | None = None,
    bridge: ListeningBridge | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[int, ListeningBridge, ListedSource]:
    """Train on batches `first_batch`, …; the source dries up after `batches` of them, as when a run is cut off."""
    count = config.training_steps - first_batch if batches is None else batches
    source = ListedSource([made_up_groups(seed) for seed in range(first_batch, first_batch + count)])
    bridge = bridge or ListeningBridge(small_model())
    steps = train_in(folder, config, source, bridge, decode=lambda ids: " ".join(map(str, ids)), stop=stop)
    return steps, bridge, source


def test_every_step_is_published_and_recorded_under_its_version_with_every_documented_metric(tmp_path: Path) -> None:
    steps, bridge, source = run(tmp_path, settings())
    assert steps == 6
    assert [version for version, _ in bridge.published] == [0, 1, 2, 3, 4, 5, 6]
    assert len({weight for _, weight in bridge.published}) == 7
    recorded = metrics_lines(tmp_path)
    assert [(line.step, line.policy_version) for line in recorded] == [(n, n) for n in range(1, 7)]
    assert all(set(METRIC_NAMES) - set(line.metrics) == {"train/gpu_memory_gb"} for line in recorded)  # on a CPU
    assert source.registered["batch_size"] == 8
    assert source.registered["starting_step"] == 0


def test_sampled_groups_hold_both_log_probabilities_of_every_token(tmp_path: Path) -> None:
    run(tmp_path, settings(training_steps=1, rollouts_groups=1))
    [text] = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    line = RolloutLine.model_validate_json(text)
    [group, _] = made_up_groups(0)
    prompt_length = sum(label < 0 for label in group.masks[0])
    assert line.prompt == " ".join(map(str, group.tokens[0][:prompt_length]))
    for completion, tokens, score in zip(line.completions, group.tokens, group.scores, strict=True):
        assert completion.token_ids == tokens[prompt_length:]
        assert completion.reward == pytest.approx(score)
        assert len(completion.inference_logprobs) == len(completion.training_logprobs) == len(completion.token_ids)
        assert all(value < 0 for value in completion.training_logprobs)
        assert "".join(completion.token_texts) == completion.text
        assert len(completion.entropies) == len(completion.token_texts) == len(completion.token_ids)
        assert all(0 < value <= math.log(VOCABULARY) for value in completion.entropies)
        assert completion.is_truncated is False


class UnreachableBridge(ListeningBridge):
    """Has no server when version 3 is to be published."""

    def publish(self, version: int, write: Callable[[], None]) -> None:
        if version == 3:
            raise PeerUnavailable("no server")
        super().publish(version, write)


def test_an_unreachable_server_at_a_weight_update_loses_no_step(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailable, match="no server"):
        run(tmp_path, settings(), bridge=UnreachableBridge(small_model()))
    assert checkpoints.newest(tmp_path / "checkpoints") == tmp_path / "checkpoints/step_3"


def test_a_step_whose_weight_update_fails_is_recorded_once(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailable, match="no server"):
        run(tmp_path, settings(), bridge=UnreachableBridge(small_model()))
    assert [line.step for line in metrics_lines(tmp_path)] == [1, 2, 3]
    run(tmp_path, settings(), first_batch=3)
    assert [line.step for line in metrics_lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_step_that_runs_out_of_memory_ends_the_run_with_what_to_do_and_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = Trainee.logprobs

    def logprobs(trainee: Trainee, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        if len(metrics_lines(tmp_path)) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. …")
        return scored(trainee, batch)

    monkeypatch.setattr(Trainee, "logprobs", logprobs)
    with pytest.raises(OutOfGpuMemory, match=r"ran out in step 4, .*: 2\.1 GB more were asked for"):
        run(tmp_path, settings(checkpoint_interval=0))
    assert [line.step for line in metrics_lines(tmp_path)] == [1, 2, 3]
    assert checkpoints.newest(tmp_path / "checkpoints") == tmp_path / "checkpoints/step_3"


def test_a_stop_while_the_server_is_unreachable_is_no_failure(tmp_path: Path) -> None:
    polls = iter([False] * 6 + [True])  # asked twice a step: before it, and while waiting for its batch
    steps, _, _ = run(tmp_path, settings(), bridge=UnreachableBridge(small_model()), stop=lambda: next(polls))
    assert steps == 3
    assert checkpoints.newest(tmp_path / "checkpoints") == tmp_path / "checkpoints/step_3"


def test_a_trainer_without_a_checkpoint_starts_from_the_model_and_not_from_what_is_served(tmp_path: Path) -> None:
    small_model(0).save_pretrained(tmp_path / "model")
    served = ListeningBridge(small_model(1), serves=16)
    config = settings(model_name=str(tmp_path / "model"), training_steps=1)
    untrained = float(small_model(0).model.embed_tokens.weight.detach()[3, 0])
    run(tmp_path / "run", config, bridge=served)
    assert served.published[0] == (17, pytest.approx(untrained))


def test_a_resumed_run_goes_on_after_its_last_step_and_gives_no_version_twice(tmp_path: Path) -> None:
    run(tmp_path, settings(), batches=4)
    steps, bridge, source = run(tmp_path, settings(), first_batch=4, bridge=ListeningBridge(small_model(), serves=5))
    assert (steps, source.registered["starting_step"]) == (6, 4)
    assert [version for version, _ in bridge.published] == [6, 7, 8]


def test_a_trainer_that_goes_on_rehearses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed: list[Trainee] = []
    monkeypatch.setattr("grpo_engine.train.loop.rehearse_step", rehearsed.append)
    run(tmp_path, settings(save_checkpoints=False), batches=2)
    run(tmp_path, settings(save_checkpoints=False), first_batch=2)
    assert len(rehearsed) == 1


@pytest.mark.parametrize(
    ("is_sure_to_fit", "mode", "is_first"),
    [(False, "shared_vllm", True), (True, "shared_vllm", False), (True, "turns", True)],
)
def test_a_step_that_fits_for_sure_is_rehearsed_while_groups_are_sampled_unless_the_engine_sleeps_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_sure_to_fit: bool, mode: str, is_first: bool
) -> None:
    happened: list[str] = []
    bridge, source = ListeningBridge(small_model()), ListedSource([made_up_groups(0)])
    monkeypatch.setattr("grpo_engine.train.loop.rehearse_step", lambda _: happened.append("rehearsed"))

    def register(**registration: object) -> None:
        happened.append("registered, sampling may begin" if registration["is_served"] else "registered")

    monkeypatch.setattr(source, "register", register)
    monkeypatch.setattr(bridge, "prepare_step", lambda: happened.append("prepared"))
    config = settings(training_steps=1, bridge={"mode": mode})
    assert train_in(tmp_path, config, source, bridge, is_sure_to_fit=is_sure_to_fit) == 1
    # A server that has exited since the weights were published takes the memory of the model with it.
    late = ["registered, sampling may begin", "prepared", "rehearsed", "prepared"]
    assert happened == (["rehearsed", "registered", "prepared"] if is_first else late)


@pytest.mark.parametrize(
    ("tokens", "num_prompt", "message"),
    [
        ([5] * 40 + [7], 40, "none of its first 32 is trained"),
        ([5, 3, 99_999], 2, "token id 99999 is outside the model's vocabulary (64)"),
        ([99_999, 3, 5], 2, "token id 99999 is outside the model's vocabulary (64)"),
    ],
    ids=["too long", "unknown token trained", "unknown token in the prompt"],
)
def test_a_group_that_cannot_be_trained_on_is_left_out_and_an_error_only_when_alone(
    tokens: list[int], num_prompt: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    group = scored_group(tokens[:num_prompt], [tokens[num_prompt:]] * 4)
    assert trainable_batch([*made_up_groups(8), group], 32, vocab_size=64).num_sequences == 8
    assert message in caplog.text
    with pytest.raises(DataError, match=re.escape(message)):
        trainable_batch([group], 32, vocab_size=64)


def test_a_batch_without_a_trainable_group_is_acknowledged_and_not_kept_in_the_journal(tmp_path: Path) -> None:
    source = ListedSource([[scored_group([5], [[99_999]] * 4)] * 2])
    with pytest.raises(DataError, match="another tokenizer made it"):
        train_in(tmp_path, settings(), source)
    assert source.num_used == 1
    assert not list((tmp_path / "checkpoints").glob("journal/*"))


def test_a_damaged_checkpoint_is_named_with_what_to_do(tmp_path: Path) -> None:
    run(tmp_path, settings())
    folder = tmp_path / "checkpoints/step_6"
    tensors = (folder / "trainer-00001.safetensors").read_bytes()
    (folder / "trainer-00001.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"step_6.*unreadable"):
        run(tmp_path, settings(training_steps=8))
    (folder / "trainer-00001.safetensors").write_bytes(tensors)
    outline = json.loads((folder / "trainer.json").read_text())
    outline["state"]["dict"] = [
        [name, {"dict": []} if name == "optimizer" else value] for name, value in outline["state"]["dict"]
    ]
    (folder / "trainer.json").write_text(json.dumps(outline))
    with pytest.raises(CheckpointError, match=r"step_6: cannot be restored \(KeyError: .*; remove it to resume"):
        run(tmp_path, settings(training_steps=8))
    (folder / CHECKPOINT_MARKER).write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: unreadable \(step: Field required\); remove"):
        run(tmp_path, settings(training_steps=8))


def test_old_checkpoints_are_pruned_and_incomplete_ones_are_ignored(tmp_path: Path) -> None:
    run(tmp_path, settings(checkpoint_interval=1, keep_checkpoints=2))
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_5", "step_6"]
    marker = json.loads((folder / "step_6" / CHECKPOINT_MARKER).read_text())
    assert (marker["step"], marker["policy_version"], marker["bridge"]) == (6, 6, "none")
    (folder / "step_6" / CHECKPOINT_MARKER).unlink()
    assert checkpoints.newest(folder) == folder / "step_5"


def test_a_run_that_only_measures_leaves_no_checkpoint(tmp_path: Path) -> None:
    steps, _, _ = run(tmp_path, settings(checkpoint_interval=2, save_checkpoints=False))
    assert steps == 6
    assert checkpoints.newest(tmp_path / "checkpoints") is None


def test_a_checkpoint_of_another_model_is_refused_with_both_names(tmp_path: Path) -> None:
    run(tmp_path, settings())
    with pytest.raises(CheckpointError, match=r"of model 'test/model', but this run trains 'other/model'.*--no-resume"):
        run(tmp_path, settings(model_name="other/model"))


def test_the_console_lines_are_the_stock_trainers() -> None:
    metrics = {
        "train/loss": -0.003595,
        "train/grad_norm": 0.4506,
        "grpo/mean_ratio": 0.998,
        "grpo/clipped_fraction": 0.012,
        "train/step_time": 2.43,
    }
    shown = console_lines(3, 30, metrics, show_times=True)
    assert shown[0] == "Step 3/30"
    assert shown[1].startswith("  Loss: -0.003595, Grad norm: 0.4506, Step time: 2.43s, Sync time: 0.00s")
    assert shown[2] == "    GRPO: ratio=0.998, clipped=1.2%"


def test_misaligned_log_probs_have_the_sentences_of_the_stock_trainer() -> None:
    metrics = {"alignment/diff_abs_mean": 0.4, "logprobs/inference_mean": -1.2, "logprobs/training_mean": -0.8}
    assert console_lines(3, 30, metrics, show_times=False)[-2:] == [
        "    [WARNING] This suggests inference_logprobs alignment is wrong",
        "    [DEBUG] Logprob gap: ref=-1.200, train=-0.800",
    ]
    healthy = console_lines(3, 30, {**metrics, "alignment/diff_abs_mean": 0.01}, show_times=False)
    assert not any("[" in line for line in healthy)


def test_the_first_batch_is_said_to_have_log_probs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, settings())
    said = [line for line in capsys.readouterr().out.splitlines() if "[Data]" in line]
    assert len(said) == 1
    assert re.fullmatch(r"    \[Data\] ✓ inference_logprobs found in batch \(sample len: \d+\)", said[0])


def test_log_probs_above_0_have_the_sentences_of_the_stock_trainer(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = made_up_groups(0, groups=2)
    assert bad.inference_logprobs is not None
    above_0 = [[0.85] * len(row) for row in bad.inference_logprobs]
    bad = bad.model_copy(update={"inference_logprobs": above_0})
    trainable_batch([good, bad], 32, vocab_size=VOCABULARY)
    assert "[WARNING] ref_logprobs avg 0.850 (should be negative!)" in caplog.text
    assert "[WARNING] ref_logprobs at generated positions avg 0.850 (should be negative!)" in caplog.text
    with pytest.raises(DataError, match="GRPO requires inference_logprobs for importance sampling!"):
        trainable_batch([good.model_copy(update={"inference_logprobs": None})], 32, vocab_size=VOCABULARY)


def test_a_metric_that_is_not_finite_stays_out_of_the_file(tmp_path: Path) -> None:
    with Recorder(tmp_path, total_steps=1, show_times=False) as recorder:
        recorder.step(1, 1, {"train/loss": float("nan"), "reward/mean": 0.5})
    [line] = metrics_lines(tmp_path)
    assert line.metrics == {"reward/mean": 0.5}
