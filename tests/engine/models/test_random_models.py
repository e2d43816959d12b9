"""Models with random weights: shaped as published, read by any library, and with varied samples."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from grpo_engine.errors import ModelError
from grpo_engine.models.loading import load_model
from grpo_engine.models.local import RANDOM_MODEL_BYTES, lacking_bytes, make_once
from grpo_engine.models.random_models import published_shape, write_random
from grpo_engine.models.tiny_tokenizer import NUM_TOKENS, tiny_tokenizer

Usage = namedtuple("Usage", "total used free")
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 64, "vocab_size": 1000}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SHARD_BYTES = 400_000


def small(name: str) -> PreTrainedConfig:
    """The published shape, with smaller numbers."""
    config = published_shape(name)
    config.update({**SMALL, **HEADS})
    if isinstance(config, Qwen2Config):
        config.layer_types = config.layer_types[:3]
    return config


@pytest.fixture(params=["local/llama-8b-random", "local/qwen-3b-random"], ids=["untied", "tied-with-biases"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_random(small(request.param), NUM_TOKENS, tmp_path, shard_bytes=SHARD_BYTES)
    return tmp_path


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_it_is_written_in_shards_that_a_library_reads_back(folder: Path) -> None:
    files = list(folder.glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size < 1.1 * SHARD_BYTES for file in files)
    model = load_model(str(folder), dtype="bfloat16", device="cpu")
    written = tensors(folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, written[name]), name
    assert written.keys() == dict(model.named_parameters()).keys()


@torch.no_grad()
def test_it_samples_varied_text_of_known_tokens_that_depends_on_the_prompt(folder: Path) -> None:
    model, tokenizer = load_model(str(folder), dtype="float32", device="cpu"), tiny_tokenizer()
    prompt = torch.tensor([tokenizer.encode("What is 3 + 4?")])
    logits = model(prompt).logits[0, -1]
    assert torch.isfinite(logits).all()
    probabilities = logits.softmax(-1)
    assert probabilities[NUM_TOKENS:].sum() == 0
    entropy = torch.special.entr(probabilities).sum()
    assert entropy > 0.95 * torch.log(torch.tensor(float(NUM_TOKENS)))
    torch.manual_seed(0)
    sampled = model.generate(prompt.expand(4, -1), max_new_tokens=40, do_sample=True, top_k=0, eos_token_id=None)
    assert int(sampled.max()) < NUM_TOKENS
    assert all(len(set(row.tolist())) > 15 for row in sampled[:, prompt.shape[1] :])
    other = prompt.clone()
    other[0, 0] += 5
    assert (model(other).logits[0, -1].log_softmax(-1) - logits.log_softmax(-1))[:NUM_TOKENS].abs().max() > 1e-4


def test_it_is_made_the_same_each_time(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    again = tmp_path_factory.mktemp("again")
    torch.manual_seed(5)
    name = "local/qwen-3b-random" if "Qwen2" in (folder / "config.json").read_text() else "local/llama-8b-random"
    write_random(small(name), NUM_TOKENS, again, shard_bytes=10 * SHARD_BYTES)  # other shards, the same numbers
    first, second = tensors(folder), tensors(again)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", RANDOM_MODEL_BYTES)
def test_the_size_that_is_asked_of_the_disk_is_that_of_the_weights(name: str) -> None:
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(published_shape(name))
    model.tie_weights()
    assert 2 * sum(parameter.numel() for parameter in model.parameters()) == RANDOM_MODEL_BYTES[name]
    assert model.config.rope_parameters["rope_type"] == ("default" if "qwen" in name else "llama3")


def test_a_disk_without_space_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 * 10**9, 59 * 10**9, 5 * 10**9))
    assert lacking_bytes("local/tiny") == 0
    with pytest.raises(ModelError, match=r"llama-8b-random: takes 16\.1 GB in .*11\.2 GB too little.*XDG_CACHE_HOME"):
        make_once("local/llama-8b-random", lambda folder: pytest.fail("made without room"))
