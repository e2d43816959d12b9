"""The loop: what happens in which order, and that a run that was cut off goes on as if it had not been."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training import VOCABULARY, ListedSource, ListeningBridge, made_up_groups, settings, small_model, weights_of

from grpo_engine.data.batching import Batch
from grpo_engine.errors import CheckpointError, DataError, PeerUnavailable
from grpo_engine.train.batch import trainable_batch
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.loop import train
from grpo_engine.train.memory.rehearsal import OutOfGpuMemory
from grpo_engine.train.recording.recorder import Recorder, console_lines
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.metrics import METRIC_NAMES, MetricsLine, RolloutLine


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
    with Recorder(folder, total_steps=config.training_steps, show_times=False) as recorder:
        steps = train(
            config,
            source,  # type: ignore[arg-type]
            bridge,
            recorder,
            decode=lambda ids: " ".join(map(str, ids)),
            save_path=folder / "checkpoints",
            stop=stop,
        )
    return steps, bridge, source


def lines(folder: Path) -> list[MetricsLine]:
    return [MetricsLine.model_validate_json(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_published_and_recorded_under_its_version(tmp_path: Path) -> None:
    steps, bridge, source = run(tmp_path, settings())
    assert steps == 6
    assert [version for version, _ in bridge.published] == [0, 1, 2, 3, 4, 5, 6]
    assert len({weight for _, weight in bridge.published}) == 7
    assert [(line.step, line.policy_version) for line in lines(tmp_path)] == [(n, n) for n in range(1, 7)]
    assert source.registered["batch_size"] == 8
    assert source.registered["starting_step"] == 0


def test_every_promised_metric_is_there_on_a_cpu(tmp_path: Path) -> None:
    run(tmp_path, settings(training_steps=1))
    [line] = lines(tmp_path)
    assert set(METRIC_NAMES) - set(line.metrics) == {"train/gpu_memory_gb"}


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


def test_a_run_that_was_cut_off_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = settings()
    run(tmp_path / "whole", config)
    run(tmp_path / "cut", config, batches=4)
    steps, bridge, source = run(tmp_path / "cut", config, first_batch=4)
    assert steps == 6
    assert source.registered["starting_step"] == 4
    assert bridge.published[0][0] == 4
    whole, cut = weights_of(tmp_path / "whole/checkpoints/step_6"), weights_of(tmp_path / "cut/checkpoints/step_6")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)

    def curve(folder: Path) -> list[dict[str, float]]:
        return [{k: v for k, v in x.metrics.items() if k.startswith(("grpo/", "reward/"))} for x in lines(folder)]

    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


def test_without_resume_a_run_starts_anew(tmp_path: Path) -> None:
    run(tmp_path, settings())
    _, bridge, _ = run(tmp_path, settings(resume=False))
    assert bridge.published[0][0] == 0


def test_a_polite_stop_saves_what_was_done(tmp_path: Path) -> None:
    steps, _, _ = run(tmp_path, settings(), batches=3)
    assert steps == 3
    newest = checkpoints.newest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step_3"


class VanishingBridge(ListeningBridge):
    """Its server is gone when version 3 is to be published."""

    def publish(self, version: int, write: Callable[[], None]) -> None:
        if version == 3:
            raise PeerUnavailable("no server")
        super().publish(version, write)


def test_a_server_that_stays_away_costs_no_step_that_was_done(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailable, match="no server"):
        run(tmp_path, settings(), bridge=VanishingBridge(small_model()))
    newest = checkpoints.newest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step_3"


def test_a_step_that_runs_out_of_memory_ends_the_run_with_what_to_do_and_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = Trainee.logprobs

    def logprobs(trainee: Trainee, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        if len(lines(tmp_path)) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. …")
        return scored(trainee, batch)

    monkeypatch.setattr(Trainee, "logprobs", logprobs)
    with pytest.raises(OutOfGpuMemory, match=r"ran out in step 4, .*: 2\.1 GB more were asked for"):
        run(tmp_path, settings(checkpoint_interval=0))
    assert [line.step for line in lines(tmp_path)] == [1, 2, 3]
    assert checkpoints.newest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_3"


def test_a_polite_stop_while_a_server_is_away_is_no_failure(tmp_path: Path) -> None:
    polls = iter([False] * 6 + [True])  # asked twice a step: before it, and while waiting for its batch
    steps, _, _ = run(tmp_path, settings(), bridge=VanishingBridge(small_model()), stop=lambda: next(polls))
    assert steps == 3
    newest = checkpoints.newest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step_3"


def test_a_trainer_without_a_checkpoint_starts_from_the_model_and_not_from_what_is_served(tmp_path: Path) -> None:
    small_model(0).save_pretrained(tmp_path / "model")
    served = ListeningBridge(small_model(1), serves=16)
    config = settings(model_name=str(tmp_path / "model"), training_steps=1)
    untrained = float(small_model(0).model.embed_tokens.weight.detach()[3, 0])
    run(tmp_path / "run", config, bridge=served)
    assert served.published[0] == (17, pytest.approx(untrained))


def test_a_version_is_never_given_twice_also_after_a_resume(tmp_path: Path) -> None:
    run(tmp_path, settings(), batches=4)
    _, bridge, _ = run(tmp_path, settings(), first_batch=4, bridge=ListeningBridge(small_model(), serves=5))
    assert [version for version, _ in bridge.published] == [6, 7, 8]


def test_one_group_that_does_not_fit_is_left_out_and_ends_no_run(tmp_path: Path) -> None:
    too_long = made_up_groups(7, groups=1)[0]
    prompt = [5] * 40
    too_long = too_long.model_copy(
        update={
            "tokens": [[*prompt, 7]] * 4,
            "masks": [[-100] * 40 + [7]] * 4,
            "inference_logprobs": [[1.0] * 40 + [-1.0]] * 4,
            "policy_versions": None,
        }
    )
    batch = trainable_batch([*made_up_groups(8), too_long], 32, vocab_size=64)
    assert batch.num_sequences == 8
    with pytest.raises(DataError, match="none of its first 32 is trained"):
        trainable_batch([too_long], 32, vocab_size=64)


@pytest.mark.parametrize("masks", [[-100, -100, 99_999], [-100, 3, -100]], ids=["trained", "read"])
def test_a_group_of_another_models_tokenizer_is_left_out_and_ends_no_run(
    masks: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    tokens = [5, 3, 99_999] if masks[2] != -100 else [99_999, 3, 5]
    strange = made_up_groups(9)[0].model_copy(
        update={
            "tokens": [tokens] * 4,
            "masks": [masks] * 4,
            "inference_logprobs": [[1.0 if label == -100 else -1.0 for label in masks]] * 4,
            "policy_versions": None,
        }
    )
    batch = trainable_batch([*made_up_groups(8), strange], 32, vocab_size=64)
    assert batch.num_sequences == 8
    assert "token id 99999 is outside the model's vocabulary (64)" in caplog.text


def test_a_batch_that_nothing_of_can_be_trained_on_is_not_left_to_the_next_trainer(tmp_path: Path) -> None:
    strange = {"tokens": [[5, 99_999]] * 4, "masks": [[-100, 99_999]] * 4, "inference_logprobs": [[1.0, -1.0]] * 4}
    groups = [group.model_copy(update={**strange, "policy_versions": None}) for group in made_up_groups(0)]
    source = ListedSource([groups])
    with (
        Recorder(tmp_path, total_steps=1, show_times=False) as recorder,
        pytest.raises(DataError, match="another tokenizer made it"),
    ):
        train(
            settings(),
            source,  # type: ignore[arg-type]
            ListeningBridge(small_model()),
            recorder,
            decode=str,
            save_path=tmp_path / "checkpoints",
        )
    assert source.num_used == 1
    assert not list((tmp_path / "checkpoints").glob("journal/*"))


def test_checkpoints_of_an_earlier_run_are_set_aside_and_not_lost(tmp_path: Path) -> None:
    run(tmp_path, settings())
    run(tmp_path, settings(resume=False, training_steps=2))
    [aside] = tmp_path.glob("checkpoints-until-*")
    assert (aside / "step_6").is_dir()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_2"]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    run(tmp_path, settings())
    (tmp_path / "checkpoints/step_6/trainer-00001.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"step_6.*unreadable"):
        run(tmp_path, settings(training_steps=8))


def test_a_checkpoint_whose_content_is_damaged_is_named_with_what_to_do(tmp_path: Path) -> None:
    run(tmp_path, settings())
    folder = tmp_path / "checkpoints/step_6"
    outline = json.loads((folder / "trainer.json").read_text())
    outline["state"]["dict"] = [
        [name, {"dict": []} if name == "optimizer" else value] for name, value in outline["state"]["dict"]
    ]
    (folder / "trainer.json").write_text(json.dumps(outline))
    with pytest.raises(CheckpointError, match=r"step_6: cannot be restored \(KeyError: .*; remove it to resume"):
        run(tmp_path, settings(training_steps=8))
    (folder / checkpoints.MARKER).write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: unreadable \(step: Field required\); remove"):
        run(tmp_path, settings(training_steps=8))


def test_old_checkpoints_are_pruned_and_half_written_ones_are_none(tmp_path: Path) -> None:
    run(tmp_path, settings(checkpoint_interval=1, keep_checkpoints=2))
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_5", "step_6"]
    (folder / "step_6" / checkpoints.MARKER).unlink()
    newest = checkpoints.newest(folder)
    assert newest is not None
    assert newest.name == "step_5"


def test_a_run_that_only_measures_leaves_no_checkpoint(tmp_path: Path) -> None:
    steps, _, _ = run(tmp_path, settings(checkpoint_interval=2, save_checkpoints=False))
    assert steps == 6
    assert checkpoints.newest(tmp_path / "checkpoints") is None


def test_a_checkpoint_of_another_model_is_refused_with_both_names(tmp_path: Path) -> None:
    run(tmp_path, settings())
    with pytest.raises(CheckpointError, match=r"of model 'test/model', but this run trains 'other/model'.*--no-resume"):
        run(tmp_path, settings(model_name="other/model"))


def test_a_checkpoint_is_a_model_that_transformers_loads(tmp_path: Path) -> None:
    _, bridge, _ = run(tmp_path, settings())
    saved = weights_of(tmp_path / "checkpoints/step_6")
    assert torch.equal(saved["model.embed_tokens.weight"], bridge.model.model.embed_tokens.weight)
    marker = json.loads((tmp_path / "checkpoints/step_6" / checkpoints.MARKER).read_text())
    assert (marker["step"], marker["policy_version"], marker["bridge"]) == (6, 6, "none")


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


def test_a_metric_that_is_not_finite_stays_out_of_the_file(tmp_path: Path) -> None:
    with Recorder(tmp_path, total_steps=1, show_times=False) as recorder:
        recorder.step(1, 1, {"train/loss": float("nan"), "reward/mean": 0.5})
    [line] = lines(tmp_path)
    assert line.metrics == {"reward/mean": 0.5}
