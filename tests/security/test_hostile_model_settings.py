"""Settings of a model and tokenizer of a checkpoint from elsewhere: an export refuses what hangs or fills memory."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import LoraConfig
from safetensors.torch import save_file
from serving import save_tiny_model
from tokenizers import Regex, decoders
from transformers import LlamaForCausalLM

from grpo_engine.errors import CheckpointError, ModelError
from grpo_engine.export import model as export
from grpo_engine.export.main import _opened
from grpo_engine.models.tiny_tokenizer import tiny_tokenizer
from grpo_engine.wire.checkpoints import CheckpointMarker


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A model with other values in one of its files."""

    def change(name: str, **values: Any) -> Path:
        folder = save_tiny_model(tmp_path / "tiny", seed=1)
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))
        return folder

    return change


@pytest.mark.parametrize("values", [
    {"num_hidden_layers": 10**6}, {"vocab_size": 10**9}, {"intermediate_size": 10**9}, {"head_dim": 10**9},
], ids=str)  # fmt: skip
def test_a_config_of_a_larger_model_than_its_tensors_is_refused_before_memory_is_taken(
    values: dict[str, int], changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_load_exported", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ModelError, match="a larger model than its tensors are"):
        export.check(changed("config.json", **values), "cpu")


def test_a_tokenizer_that_multiplies_a_text_is_refused_within_its_limits(
    changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "TRIAL_CPU_S", 1)
    replacements = [{"type": "Replace", "pattern": {"String": " "}, "content": " " * 100}] * 6
    folder = changed("tokenizer.json", normalizer={"type": "Sequence", "normalizers": replacements})
    with pytest.raises(ModelError, match="takes more than 1 s of CPU or 4 GiB"):
        export.check(folder, "cpu")


def test_what_was_sampled_is_decoded_in_a_process_with_limits_and_its_beginning_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer: Any = tiny_tokenizer()
    any_letter = decoders.Replace(Regex("."), "a" * 100)
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([any_letter] * 2)
    assert export._decoded(tokenizer, [49]) == "a" * 1000
    monkeypatch.setattr(tokenizer, "decode", lambda _: str(resource.getrlimit(resource.RLIMIT_CPU)[0]))
    assert export._decoded(tokenizer, [49]) == str(export.TRIAL_CPU_S)
    monkeypatch.setattr(tokenizer, "decode", lambda _: 1 / 0)
    with pytest.raises(ModelError, match="tokens that its tokenizer does not decode"):
        export._decoded(tokenizer, [49])


def test_a_model_that_fails_for_want_of_memory_or_takes_too_long_is_refused(
    changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(how: Callable[[], object]) -> None:
        monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: how())
        export.check(changed("config.json"), "cpu")

    def take_long() -> None:  # as a million in `num_hashes` of a Reformer
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # the rest of its time
        sum(1 for _ in iter(int, 1))

    with pytest.raises(ModelError, match=r"samples nothing: .*allocate memory"):  # as 40,000 in `chunk_size` of Mamba 2
        take(lambda: torch.empty(5 << 30, dtype=torch.uint8))
    with pytest.raises(ModelError, match="samples nothing: TimeoutError: it takes longer than"):
        take(take_long)


def test_the_base_of_an_adapter_is_tried_as_a_whole_model_is(
    changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def marker(base: Path) -> CheckpointMarker:
        return CheckpointMarker(step=1, policy_version=1, model_name=str(base), bridge="lora_only", settings={})

    export.require_base(marker(changed("config.json")))
    with pytest.raises(ModelError, match="a larger model than its tensors are"):
        export.require_base(marker(changed("config.json", num_hidden_layers=20_000)))
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda _: ["model.safetensors"])
    of_hub = changed("config.json", num_hidden_layers=20_000)

    def snapshot(*_: object, local_files_only: bool = False, **__: object) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        return str(of_hub)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelError, match="a larger model than its tensors are"):
        export.require_base(marker(Path("org/model")))  # one that has to be downloaded
    folder = changed("config.json")
    os.mkfifo(folder / "more.safetensors")
    with pytest.raises(ModelError, match=r"more\.safetensors: cannot be read"):
        export.require_base(marker(folder))
    (folder / "adapter_config.json").write_text("{}")  # whose patterns match without end
    with pytest.raises(ModelError, match="is an adapter itself"):
        export.require_base(marker(folder))


@pytest.mark.parametrize("index", [
    {"model.safetensors.index.json": {"weight_map": {"lm_head.weight": "more/pipe.safetensors"}}},
    {"pytorch_model.bin.index.json": {"weight_map": {"lm_head.weight": "/tmp/pipe"}}},
    {"config.json": {"transformers_weights": "more/pipe.safetensors"}},
], ids=str)  # fmt: skip
def test_weights_that_are_named_in_another_folder_are_refused(
    index: dict[str, dict[str, object]], changed: Callable[..., Path]
) -> None:
    """Where the name is that of a pipe, safetensors waited for it without end: it goes on waiting after a signal."""
    folder = changed("config.json")
    ((name, values),) = index.items()
    before = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps({**before, **values}))
    marker = CheckpointMarker(step=1, policy_version=1, model_name=str(folder), bridge="lora_only", settings={})
    with pytest.raises(ModelError, match="names weights that are not beside it"):
        export.require_base(marker)
    with pytest.raises(ModelError, match="names weights that are not beside it"):
        export.check(folder, "cpu")


def test_pickled_weights_that_double_a_text_over_and_over_are_refused(
    changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SAMPLE_BYTES", 32 << 20)
    folder = changed("config.json")
    (folder / "model.safetensors").unlink()
    encode, latin1, to_hex = b"c_codecs\nencode\n", b"X\1\0\0\0AX\6\0\0\0latin1\x86R", b"X\3\0\0\0hex\x86R"
    with ZipFile(folder / "pytorch_model.bin", "w") as file:
        # 2 GB: a process in which other tests ran may have 100 MB of its own to give again.
        file.writestr("archive/data.pkl", b"\x80\2}X\1\0\0\0A" + encode * 32 + latin1 + to_hex * 31 + b"s.")
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
    with pytest.raises(ModelError, match="does not load: MemoryError"):
        export.check(folder, "cpu")


def test_a_checkpoint_or_base_that_is_mostly_holes_is_neither_copied_nor_loaded(tmp_path: Path) -> None:
    for name in ("checkpoint.json", "config.json", "model.safetensors"):
        (tmp_path / name).touch()
    os.truncate(tmp_path / "model.safetensors", 1 << 32)  # an archive of some kB may have 100 GB of it
    with ExitStack() as stack, pytest.raises(CheckpointError, match="longer than what was written in it"):
        _opened(tmp_path, stack)
    marker = CheckpointMarker(step=1, policy_version=1, model_name=str(tmp_path), bridge="lora_only", settings={})
    with pytest.raises(ModelError, match="longer than what was written in it"):
        export.require_base(marker)


def test_a_model_as_it_was_saved_is_loaded_whatever_its_generation_config_asks_for(
    changed: Callable[..., Path],
) -> None:
    folder = changed("config.json")
    # A million beams took 12 GB for the embedding of a prompt alone.
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 10**9, "stop_strings": ["1"]}))
    assert "it loads, and answers" in export.check(folder, "cpu")


ADAPTER = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "rank_pattern": {}, "exclude_modules": None}


@pytest.mark.parametrize("values", [
    {"target_modules": r"(\w+\.?)+(\w+\.?)+x"}, {"exclude_modules": "(a+)+b"}, {"rank_pattern": {"(a+)+b": 2}},
    {"alpha_pattern": {"(a+)+b": 2}}, {"layers_pattern": ["(a+)+b"]}, {"r": 20_000_000}, {"r": [2]},
    {"target_modules": [5]}, {"peft_type": "XLORA"}, {"layer_replication": [[0, 2]] * 9},
    {"init_lora_weights": "pissa_niter_1000000000"}, {"target_modules": ["q_proj", "k_proj"]},
], ids=str)  # fmt: skip
def test_an_adapter_with_other_settings_than_a_trainer_writes_is_not_exported(
    values: dict[str, Any], tmp_path: Path
) -> None:
    save_file({"layers.0.q_proj.lora_A.weight": torch.ones(2, 4)}, tmp_path / export.ADAPTER_WEIGHTS)
    settings = tmp_path / "adapter_config.json"
    usual = {**LoraConfig(task_type="CAUSAL_LM", inference_mode=True).to_dict(), **ADAPTER}
    for written in (ADAPTER, usual, {**usual, "layers_to_transform": [0, 1]}):  # with layer_indices of a trainer
        settings.write_text(json.dumps(written))
        export.require_adapter(tmp_path)
    settings.write_text(json.dumps({**ADAPTER, **values}))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: "):
        export.require_adapter(tmp_path)
