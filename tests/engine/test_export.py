"""`grpo-engine export`: what it writes loads elsewhere, and is whole or not there."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_engine.bridges.transport.saving import save_model
from grpo_engine.errors import CheckpointError, ConfigError, ModelError
from grpo_engine.export.config import ExportConfig
from grpo_engine.export.main import _new_folder, run
from grpo_engine.export.model import add_generation_config, merge
from grpo_engine.flags import parse_flags, to_flags
from grpo_engine.models.config import DtypeName, LoraSettings
from grpo_engine.models.loading import load_model
from grpo_engine.models.lora import add_lora
from grpo_engine.train.checkpointing.checkpoints import save, write_state_files
from grpo_engine.wire.checkpoints import TRAINER_SETTINGS, CheckpointMarker

TOKENS = torch.tensor([[5, 6, 7, 8]])


def checkpoint(folder: Path, base: Path, *, with_adapter: bool = False, dtype: DtypeName = "float32") -> Path:
    """A checkpoint as the trainer saves it, of a model that differs from its base."""
    model = load_model(str(base), dtype=dtype, device="cpu")
    if with_adapter:
        model = add_lora(model, LoraSettings(rank=2, alpha=4, target_modules=("q_proj", "v_proj")))
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 10)
    marker = CheckpointMarker(step=3, policy_version=3, model_name=str(base), bridge="none", settings={"dtype": dtype})

    def write(path: Path) -> None:
        save_model(model, str(base), path)
        write_state_files(path, masters={"x": torch.ones(2)}, optimizer={}, random=[], bad_steps=0, loss_scale={})
        (path / TRAINER_SETTINGS).write_text("{}")
        (path / "trainer").mkdir()
        (path / "trainer" / "__0_0.distcp").touch()  # as several ranks write theirs

    return save(folder, marker, write, keep=3)


@pytest.fixture(scope="module")
def base(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a generation config of its own."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("base") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": tokenizer.chat_template or "{{ messages[0].content }}", "tool_use": "{{ 1 }}"}
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"top_k": 7, "do_sample": true, "eos_token_id": 2}')
    return folder


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("whole"), base)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("adapter"), base, with_adapter=True)


def exported(of: Path, to: Path, **changes: object) -> Path:
    assert run(ExportConfig(checkpoint=of, folder=to, **changes)) == 0  # type: ignore[arg-type]
    return to


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits  # type: ignore[no-any-return]


def test_a_whole_model_is_exported_without_the_state_of_its_trainer(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "card.md").write_text("# A card")
    folder = exported(whole, tmp_path / "new" / "model", card=tmp_path / "card.md")
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "generation_config.json"} <= names
    assert not [name for name in names if name.startswith(("trainer", "checkpoint"))]
    assert (folder / "README.md").read_text() == "# A card"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.top_k == 7  # the base model's
    saved = load_file(whole / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("1+1")["input_ids"]
    assert tokenizer.chat_template["tool_use"] == "{{ 1 }}"
    assert not list((tmp_path / "new").glob(".*"))


def test_an_adapter_is_exported_as_it_is_or_merged_into_its_base(adapter: Path, base: Path, tmp_path: Path) -> None:
    apart = AutoPeftModelForCausalLM.from_pretrained(exported(adapter, tmp_path / "apart"))
    merged_folder = exported(adapter, tmp_path / "merged", merge_lora=True)
    merged = AutoModelForCausalLM.from_pretrained(merged_folder)
    assert not list(merged_folder.glob("adapter*"))
    torch.testing.assert_close(logits(merged), logits(apart), atol=1e-4, rtol=1e-4)
    untrained = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(logits(merged), logits(untrained), atol=1e-3)


def test_a_merged_model_has_no_tokenizer_file_to_which_a_link_beside_its_base_leads(
    adapter: Path, base: Path, tmp_path: Path
) -> None:
    (tmp_path / "id_rsa").write_text("secret")
    linked, folder = shutil.copytree(base, tmp_path / "base"), shutil.copytree(adapter, tmp_path / "merged")
    (linked / "chat_template.jinja").unlink()
    (linked / "chat_template.jinja").symlink_to(tmp_path / "id_rsa")  # an archive may have such a link
    marker = CheckpointMarker(step=3, policy_version=3, model_name=str(linked), bridge="none", settings={})
    merge(folder, marker, "cpu")
    assert (folder / "model.safetensors").exists()
    assert (folder / "chat_template.jinja").read_text() == (adapter / "chat_template.jinja").read_text() != "secret"


def test_a_merged_model_has_the_type_of_the_run_and_is_rounded_once(base: Path, tmp_path: Path) -> None:
    of = checkpoint(tmp_path / "checkpoints", base, with_adapter=True, dtype="bfloat16")
    merged = load_file(exported(of, tmp_path / "model", merge_lora=True) / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    adapter = load_file(of / "adapter_model.safetensors")
    first, second = (adapter[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
    weight = load_file(base / "model.safetensors")[f"{name}.weight"].bfloat16()
    expected = (weight.float() + 4 / 2 * second @ first).bfloat16()  # alpha / rank
    assert torch.equal(merged[f"{name}.weight"], expected)


def test_a_folder_that_is_not_empty_is_left_as_it_is(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("kept")
    with pytest.raises(ConfigError, match="model: is not empty"):
        exported(whole, tmp_path / "model")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: is a file"):
        exported(whole, tmp_path / "file")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine"]


def test_an_export_that_fails_leaves_nothing_and_one_that_was_killed_is_begun_again(
    whole: Path, tmp_path: Path
) -> None:
    left = tmp_path / ".model.partial"
    (left / "sub").mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    assert "sub" not in {path.name for path in exported(whole, tmp_path / "model").iterdir()}
    with pytest.raises(ConfigError, match="holds a whole model and no adapter"):
        exported(whole, tmp_path / "other", merge_lora=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_two_exports_do_not_write_into_one_folder_nor_into_what_a_link_leads_to(whole: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".model.partial"
    partial.mkdir()
    other = os.open(partial, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another export writes it"):
        exported(whole, tmp_path / "model")
    os.close(other)
    partial.rmdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    partial.symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="cannot be written"):
        exported(whole, tmp_path / "model")
    assert (tmp_path / "mine" / "file").exists()


def test_a_model_that_does_not_load_whole_is_not_exported(whole: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(whole, tmp_path / "step_3")
    tensors = load_file(whole / "model.safetensors")
    some = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp" not in name}
    save_file(some, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing or wrong tensors: .*layers\.0\.mlp"):
        exported(damaged, tmp_path / "model")
    nan = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    save_file(nan, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="not finite"):
        exported(damaged, tmp_path / "model")
    (damaged / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelError, match="does not load"):
        exported(damaged, tmp_path / "model")
    (damaged / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint"):
        exported(damaged, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_settings_of_a_tokenizer_of_another_type_are_an_error_of_the_model(whole: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(whole, tmp_path / "step_3")
    settings = json.loads((whole / "tokenizer_config.json").read_text())
    (damaged / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": ["a", "list"]}))
    with pytest.raises(ModelError, match=r"does not load: \w+Error: "):
        exported(damaged, tmp_path / "model")


def test_an_adapter_with_a_missing_tensor_is_not_exported(adapter: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(adapter, tmp_path / "step_3")
    tensors = load_file(adapter / "adapter_model.safetensors")
    first = next(iter(tensors))
    del tensors[first]
    save_file(tensors, damaged / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="missing"), pytest.raises(ModelError, match=f"wrong tensors: {first}"):
        exported(damaged, tmp_path / "model")


def test_a_chat_template_that_refuses_a_question_is_reported_and_exported(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = shutil.copytree(whole, tmp_path / "step_3")
    (odd / "chat_template.jinja").write_text("{{ raise_exception('a system message is needed') }}")
    exported(odd, tmp_path / "model")
    assert "a system message is needed" in caplog.text
    assert (tmp_path / "model" / "chat_template.jinja").is_file()


def test_a_checkpoint_that_was_removed_meanwhile_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step_9: cannot be read: No such file.*keep_checkpoints"):
        exported(tmp_path / "step_9", tmp_path / "model")


def test_its_flags_give_its_settings_again(tmp_path: Path) -> None:
    config = ExportConfig(checkpoint=tmp_path / "step_3", folder=tmp_path / "-a", merge_lora=True, device="cuda:1")
    assert parse_flags(ExportConfig, to_flags(config), prog="grpo-engine export", description="") == config


def test_no_link_beside_the_model_that_a_checkpoint_names_is_followed_and_nothing_but_json_is_taken(
    tmp_path: Path,
) -> None:
    named, exported, secret = tmp_path / "named", tmp_path / "exported", tmp_path / "secret.json"
    for folder in (named, exported):
        folder.mkdir()
    (named / "config.json").write_text("{}")
    secret.write_text('{"token": "secret"}')
    marker = CheckpointMarker(step=3, policy_version=3, model_name=str(named), bridge="none")
    path = named / "generation_config.json"
    path.symlink_to(secret)
    with pytest.raises(CheckpointError, match="is a link"):
        add_generation_config(exported, marker)
    path.unlink()
    for content in ("secret", '["secret"]', "[" * 100_000, '{"a": "' + "b" * (1 << 20) + '"}'):
        path.write_text(content)
        with pytest.raises(CheckpointError, match=r"generation_config.json: is no JSON object"):
            add_generation_config(exported, marker)
    assert not any(exported.iterdir())
    path.write_text('{"top_k": 7}')
    add_generation_config(exported, marker)
    assert json.loads((exported / path.name).read_text()) == {"top_k": 7}


def test_the_generation_config_of_a_model_in_the_cache_of_the_hub_is_a_link_that_is_followed_to_a_blob(
    tmp_path: Path,
) -> None:
    """And nowhere else, wherever a plan from elsewhere says that the cache is."""
    snapshot, exported = tmp_path / "snapshots" / "3f2a", tmp_path / "exported"
    for folder in (snapshot, exported, tmp_path / "blobs", tmp_path / "private"):
        folder.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "blobs" / "a1").write_text('{"top_k": 7}')
    (tmp_path / "private" / "a1").write_text('{"auths": "SECRET"}')
    (snapshot / "generation_config.json").symlink_to("../../blobs/a1")
    marker = CheckpointMarker(step=3, policy_version=3, model_name=str(snapshot), bridge="none")
    add_generation_config(exported, marker)
    assert json.loads((exported / "generation_config.json").read_text()) == {"top_k": 7}

    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to("../../private/a1")
    with pytest.raises(CheckpointError):
        add_generation_config(exported, marker)
    (tmp_path / "blobs").rename(tmp_path / "away")
    (tmp_path / "blobs").symlink_to("private")
    with pytest.raises(CheckpointError):
        add_generation_config(exported, marker)
    assert "SECRET" not in (exported / "generation_config.json").read_text()


def test_an_export_that_is_interrupted_as_it_makes_its_folder_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(KeyboardInterrupt), _new_folder(tmp_path / "model"):
        pass
    monkeypatch.undo()
    assert not os.listdir(tmp_path)
