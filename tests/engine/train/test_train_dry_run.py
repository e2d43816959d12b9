"""Before training: the dry run, and the rehearsal of the longest micro-batch, which changes nothing."""

from __future__ import annotations

import json
import os
import re
import socket
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training import attached, made_up_groups, settings, small_model
from transformers import GPT2Config, LlamaConfig, T5Config

from grpo_engine import cli
from grpo_engine.bridges.transport import in_process
from grpo_engine.data.batching import bundles, make_batch, micro_batches
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora
from grpo_engine.train.memory.dry_run import log_plan, model_shape, report
from grpo_engine.train.memory.plan import Card, memory_plan
from grpo_engine.train.memory.rehearsal import (
    OutOfGpuMemory,
    batches_to_compile,
    longest_batch,
    out_of_memory_explained,
    rehearse,
    rehearse_step,
)
from grpo_engine.train.step import StepResult, gradient_step
from grpo_engine.train.trainee import Trainee

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which …"


@pytest.fixture
def config_folder(tmp_path: Path) -> Path:
    """A model's folder with its configuration, and no weights."""
    LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=50,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Bound and not listened on: connections are refused."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_a_dry_run_needs_only_a_configuration(
    config_folder: Path,
    closed_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *("train", "--dry-run", "--model", str(config_folder)),
        *("--device", "cpu", "--atropos-url", f"http://127.0.0.1:{closed_port}", "--vllm-port", str(closed_port)),
        *("--train-layer-indices", "2", "--seq-len", "128"),
    ]
    assert cli.main(words) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert re.search(r"^model +.*model: 3 layers, 129,728 parameters$", said.out, re.MULTILINE)
    assert re.search(r"^trained +41,088 parameters: layers 2$", said.out, re.MULTILINE)
    assert re.search(r"^micro-batch +2 x 127 tokens at the longest; 64 sequences a step$", said.out, re.MULTILINE)
    assert re.search(r"^  master weights +0\.2 MB$", said.out, re.MULTILINE)
    assert "none on this machine" in said.out
    assert os.listdir(tmp_path) == ["model"]


def test_a_dry_run_makes_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["train", "--dry-run", "--model", "local/llama-8b-random", "--device", "cpu"]) == 0
    assert re.search(r"^model +.*32 layers, 8,030,261,248 parameters$", capsys.readouterr().out, re.MULTILINE)
    assert os.listdir(tmp_path) == []


def test_a_dry_run_of_a_missing_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--dry-run", "--model", str(tmp_path / "nowhere")]) == cli.FINAL_ERROR
    said = capsys.readouterr()
    assert said.out == ""
    assert "nowhere" in said.err
    assert "Traceback" not in said.err


def test_a_card_with_room_is_compared_with_the_plan(config_folder: Path) -> None:
    config = settings(model_name=str(config_folder))
    text, fits = report(config, Card(name="A card", total_bytes=24 * 10**9, free_bytes=23 * 10**9))
    assert fits
    assert "A card: 24.0 GB; 23.0 GB for the trainer" in text
    assert re.search(r"^fits +22\.\d GB to spare$", text, re.MULTILINE)


def test_sequences_are_planned_no_longer_than_a_model_has_positions(
    config_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    GPT2Config(vocab_size=50, n_positions=512, n_embd=64, n_layer=2, n_head=2).save_pretrained(tmp_path / "gpt2")
    text, _ = report(settings(model_name=str(tmp_path / "gpt2"), seq_len=2048))
    assert "x 511 tokens at the longest" in text
    assert f"seq_len 2048: {tmp_path / 'gpt2'} has only 512 positions; using that" in caplog.text
    text, _ = report(settings(model_name=str(config_folder), seq_len=4096))  # rotary: has no last position
    assert "x 4095 tokens at the longest" in text


def test_ranks_are_listed_with_their_cards_and_the_fullest_card_decides(config_folder: Path) -> None:
    config = settings(model_name=str(config_folder), processes=2, bridge={"mode": "none"}, device="cuda")
    roomy, full = (Card(name=f"card {free}", total_bytes=24 * 10**9, free_bytes=free * 10**8) for free in (230, 1))
    text, fits = report(config, roomy, full)
    assert not fits
    assert re.search(r"^ranks +2, each needs \d\.\d GB on a GPU$", text, re.MULTILINE)
    assert re.search(r"^  rank 0 +cuda:0: card 230, 23\.0 GB for it$", text, re.MULTILINE)
    assert re.search(r"^  rank 1 +cuda:1: card 1, 0\.1 GB for it$", text, re.MULTILINE)
    assert re.search(r"^card +card 1: ", text, re.MULTILINE)


def test_a_card_without_room_gets_suggestions(config_folder: Path) -> None:
    config = settings(model_name=str(config_folder), batch_size=512, seq_len=2048, bridge={"mode": "shared_vllm"})
    card = Card(name="A card", total_bytes=8 * 10**9, free_bytes=4_400_000_000, inference_share=0.45)
    text, fits = report(config, card)
    assert not fits
    assert "A card: 8.0 GB, 45% of it for inference; 4.4 GB for the trainer" in text
    assert re.search(r"^  --gradient-checkpointing +frees \d+\.\d GB$", text, re.MULTILINE)
    enough = re.search(r"^enough +(--\S.*)$", text, re.MULTILINE)
    assert enough is not None
    words = enough[1].split()
    changes = {"gradient_checkpointing": "--gradient-checkpointing" in words}
    if "--batch-size" in words:
        changes["batch_size"] = int(words[words.index("--batch-size") + 1])
    config = config.model_copy(update=changes)
    shape = model_shape(LlamaConfig.from_pretrained(config_folder), config)
    assert memory_plan(shape, config).needed_bytes <= card.free_bytes


def test_every_start_on_a_gpu_has_the_plan_in_its_log(
    config_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(name="A card", total_bytes=8 * 10**9, free_bytes=4 * 10**9)
    monkeypatch.setattr("grpo_engine.train.memory.dry_run.card_now", lambda config: card)
    caplog.set_level("INFO", logger="grpo_engine.train")
    assert log_plan(settings(model_name=str(config_folder)))
    assert not log_plan(settings(model_name=str(config_folder), batch_size=512, seq_len=2048))
    fitting, too_large = caplog.records
    assert fitting.levelname == "INFO"
    assert re.search(r"^memory: 0\.6 GB at the peak \(.*\); A card has 4\.0 GB free$", fitting.getMessage())
    assert too_large.levelname == "WARNING"
    assert "it does not fit. It should fit with --gradient-checkpointing" in too_large.getMessage()
    tight = replace(card, free_bytes=610_000_000)
    monkeypatch.setattr("grpo_engine.train.memory.dry_run.card_now", lambda config: tight)
    assert not log_plan(settings(model_name=str(config_folder)))  # it fits by its plan, not for sure
    assert caplog.records[-1].levelname == "INFO"


def test_a_model_without_a_memory_plan_starts_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(name="A card", total_bytes=8 * 10**9, free_bytes=4 * 10**9)
    monkeypatch.setattr("grpo_engine.train.memory.dry_run.card_now", lambda config: card)
    T5Config(d_model=8, d_ff=8, num_layers=1, vocab_size=10).save_pretrained(tmp_path)
    assert not log_plan(settings(model_name=str(tmp_path)))
    [said] = caplog.records
    assert "no memory plan" in said.getMessage()


def state_of(trainee: Trainee) -> dict[str, torch.Tensor]:
    """Everything that a step can change, copied."""
    tensors = {f"parameter {name}": value for name, value in trainee.model.named_parameters()}
    tensors |= {f"master {name}": value for name, value in trainee._masters.state_dict().items()}
    for index, state in enumerate(trainee.optimizer.state.values()):
        tensors |= {f"state {index} {key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return {**copies, "random": torch.get_rng_state(), "bad steps": torch.tensor(trainee._bad_steps)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "master_weights": "stochastic_rounding"},
        {"bridge": {"mode": "lora_only"}, "lora_dropout": 0.3},
        {"num_iterations": 2, "gradient_checkpointing": True},
        {"micro_batch_tokens": 64},
    ],
    ids=["shared fp32", "shared bf16", "rounded", "adapter with dropout", "two updates", "budget"],
)
def test_after_a_rehearsal_everything_is_as_it_was(changes: dict[str, object]) -> None:
    config = settings(**changes)

    def one_step(trainee: Trainee, step: int) -> StepResult:
        return gradient_step(trainee, make_batch(made_up_groups(step), seq_len=32), step=step, policy_version=step)

    def fresh() -> Trainee:
        torch.manual_seed(3)
        model = small_model().to(getattr(torch, config.dtype))
        if config.bridge.mode == "lora_only":
            lora = LoraSettings(rank=4, dropout=config.lora_dropout, target_modules=("q_proj", "v_proj"))
            model = add_lora(model, lora)
        trainee = Trainee(attached(model, is_shared=config.bridge.mode != "lora_only"), config)
        torch.manual_seed(7)
        one_step(trainee, 0)  # with a state of the optimizer
        return trainee

    trainee, never_rehearsed = fresh(), fresh()
    torch.manual_seed(11)
    before = state_of(trainee)
    rehearse(trainee)
    after = state_of(trainee)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert all(parameter.grad is None for parameter in trainee.model.parameters())
    assert all(p.grad is None for group in trainee.optimizer.param_groups for p in group["params"])

    results = []
    for each in (trainee, never_rehearsed):
        torch.manual_seed(13)
        results.append(one_step(each, 1))
    assert json.dumps(results[0].metrics) == json.dumps(results[1].metrics)
    assert torch.equal(results[0].logprobs, results[1].logprobs)
    left, right = state_of(trainee), state_of(never_rehearsed)
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_a_rehearsal_runs_every_token_of_the_longest_rows_and_twice_as_many_rows() -> None:
    trainee = Trainee(attached(small_model()), settings(batch_size=3, gradient_accumulation_steps=4, seq_len=20))
    inputs: list[tuple[int, ...]] = []
    hook = trainee.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    rehearse(trainee)
    hook.remove()
    assert sum(rows * length for rows, length in inputs) == 6 * 19
    assert longest_batch(trainee.config).num_tokens == 6 * 19


def test_each_of_several_ranks_rehearses_two_micro_batches_and_a_shared_prompt() -> None:
    changes = {"batch_size": 3, "gradient_accumulation_steps": 4, "seq_len": 20, "micro_batch_tokens": 60}
    trainee = Trainee(attached(small_model()), settings(**changes, compile_layers=False))
    assert trainee.shares_prompts
    longest, shared = longest_batch(trainee.config, 2), batches_to_compile(trainee, 2)[-1]
    for rank in range(2):
        of_rank = {"max_tokens": 60, "shares_prompts": True, "rank": rank, "num_ranks": 2}
        assert [part.batch.num_tokens for part in micro_batches(longest, **of_rank)] == [3 * 19, 3 * 19]
        [part] = micro_batches(shared, **of_rank)
        assert bundles(part.batch) == [[0, 1]]


@pytest.mark.parametrize("micro_batch_tokens", [60, 120])
def test_one_row_and_several_are_rehearsed_however_many_fit(micro_batch_tokens: int) -> None:
    """Where two of the longest fitted, layers were compiled for a single row within a step, of 28 s on an H200."""
    changes = {"batch_size": 4, "seq_len": 60, "micro_batch_tokens": micro_batch_tokens}
    trainee = Trainee(attached(small_model()), settings(**changes, compile_layers=False))
    trainee.config = trainee.config.model_copy(update={"compile_layers": True})  # nothing is computed here
    trainee._scorer.shares_prompts = False  # plain rows
    batches = [longest_batch(trainee.config, 2), *batches_to_compile(trainee, 2)]
    for rank in range(2):
        of_rank = {"max_tokens": micro_batch_tokens, "shares_prompts": False, "rank": rank, "num_ranks": 2}
        rows = {len(part.batch.inputs) for batch in batches for part in micro_batches(batch, **of_rank)}
        assert rows == {1, 2}


def test_an_engine_that_sleeps_in_this_process_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "_gpu_memory", iter([(10, 80), (40, 80)]).__next__)
    meter = in_process.SleepMeter()
    with meter.measuring():
        pass
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 91)  # torch counts what vLLM has unmapped
    assert Trainee(attached(small_model(), asleep_bytes=lambda: meter.freed_bytes), settings()).peak_bytes() == 61


def test_on_a_cpu_nothing_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = Trainee(attached(small_model()), settings(probe=True))
    monkeypatch.setattr(trainee, "logprobs", lambda batch: pytest.fail("it was"))
    rehearse_step(trainee)


def test_running_out_of_memory_is_explained_and_frees_the_gradients() -> None:
    trainee = Trainee(attached(small_model()), settings(batch_size=4, seq_len=32))
    activations_of: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activations = torch.ones(5)
        activations_of.append(weakref.ref(activations))
        for group in trainee.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    with pytest.raises(OutOfGpuMemory) as caught, out_of_memory_explained(trainee, "in step 7"):
        step()
    said = "memory ran out in step 7, with micro-batches of up to 4 x 31 tokens: 2.7 GB more were asked for"
    assert said in str(caught.value)
    assert all(p.grad is None for group in trainee.optimizer.param_groups for p in group["params"])
    assert activations_of[0]() is None


def test_other_errors_are_raised_unchanged() -> None:
    trainee = Trainee(attached(small_model()), settings())
    with pytest.raises(KeyError), out_of_memory_explained(trainee, "in step 7"):
        raise KeyError("x")


def test_suggestions_after_running_out_of_memory_free_at_least_what_was_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A card on which the plan finds enough room, though torch did not.
    card = Card(name="A card", total_bytes=80 * 10**9, free_bytes=80 * 10**9)
    monkeypatch.setattr("grpo_engine.train.memory.rehearsal.card_now", lambda config: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, card.total_bytes))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 70 * 10**9)
    trainee = Trainee(attached(small_model()), settings(batch_size=4096, seq_len=2048))
    with pytest.raises(OutOfGpuMemory) as caught, out_of_memory_explained(trainee, "in step 7"):
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)
    said = str(caught.value)
    assert "1.0 GB of the 80.0 GB of A card are free, the trainer holds 70.0 GB" in said
    assert "It should fit with --gradient-checkpointing" in said
