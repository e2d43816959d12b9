"""What the fork server reads of a model for the servers that it forks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from serving import save_tiny_model

from grpo_engine.errors import ModelError
from grpo_engine.server import preloading
from grpo_engine.server.vllm import read_ahead
from grpo_engine.server.vllm.checkpoint import parameters_of


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that the fork server has read, also in vLLM."""
    monkeypatch.setattr(read_ahead, "_ahead", {})
    cached = lru_cache(lambda name, **_: SimpleNamespace(name_or_path=name, init_kwargs={}))
    tokenizers, renderers, hf = (
        ModuleType(name) for name in ("vllm.tokenizers", "vllm.renderers", "vllm.renderers.hf")
    )
    tokenizers.cached_get_tokenizer = cached
    tokenizers.cached_tokenizer_from_config = lambda config: cached(config.tokenizer, mode=config.tokenizer_mode)
    templates = hf._PROCESSOR_CHAT_TEMPLATES = {}
    hf.cached_get_processor = lambda name: f"the template of {name}'s processor"

    def look(tokenizer: Any, *, trust_remote_code: bool) -> None:
        processor = hf.cached_get_processor(tokenizer.name_or_path)
        template = processor if isinstance(processor, str) else None
        templates.setdefault((tokenizer.name_or_path, trust_remote_code), template)

    hf._try_get_processor_chat_template = look
    hf.maybe_make_thread_pool = lambda tokenizer, copies: tokenizer
    renderers.hf = hf
    for module in (ModuleType("vllm"), tokenizers, renderers, hf):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    model = str(save_tiny_model(tmp_path / "model", seed=1))
    read_ahead.read_ahead(model)
    assert (cached.cache_info().currsize, list(templates)) == (1, [(model, False)])
    return model


def test_a_server_has_what_its_fork_server_has_read(read: str) -> None:
    again = read_ahead.read_model(read)
    assert again is read_ahead.read_model(read)
    (Path(read) / "model.safetensors").touch()  # as a trainer may
    assert again is read_ahead.read_model(read)
    assert again.parameters == parameters_of(read)
    read_ahead.read_ahead(read)  # as when the turn of the service has come
    assert again is read_ahead.read_model(read)


def test_a_model_that_has_changed_before_its_turn_is_read_again_also_by_vllm(read: str) -> None:
    file = Path(read) / "tokenizer_config.json"
    file.write_text(file.read_text().replace("<eos>", "<unk>"))
    read_ahead.read_ahead(read)
    again = read_ahead.read_model(read)
    assert again.tokenizer.eos_token == "<unk>"
    assert again is read_ahead.read_model(read)
    assert sys.modules["vllm.tokenizers"].cached_get_tokenizer.cache_info().misses == 1  # since its cache was emptied


@pytest.mark.parametrize("name", ["processor_config.json", "preprocessor_config.json"])
def test_vllm_looks_into_the_processor_of_a_model_that_has_one(read: str, name: str) -> None:
    templates = sys.modules["vllm.renderers.hf"]._PROCESSOR_CHAT_TEMPLATES
    assert list(templates.values()) == [None]
    (Path(read) / name).write_text("{}")
    read_ahead.read_ahead(read)
    assert list(templates.values()) == [f"the template of {read}'s processor"]


def test_a_tokenizer_whose_files_have_changed_is_loaded_again_also_by_vllm(read: str) -> None:
    before = read_ahead.read_model(read).tokenizer
    file = Path(read) / "tokenizer_config.json"
    file.write_text(file.read_text().replace("<eos>", "<unk>"))
    again = read_ahead.read_model(read).tokenizer
    assert (before.eos_token, again.eos_token) == ("<eos>", "<unk>")
    assert sys.modules["vllm.tokenizers"].cached_get_tokenizer.cache_info().currsize == 0
    assert not sys.modules["vllm.renderers.hf"]._PROCESSOR_CHAT_TEMPLATES


def test_a_link_to_nothing_in_the_models_folder_keeps_no_server_from_starting(read: str) -> None:
    (Path(read) / "README.md").symlink_to("nothing")  # as in a cache of the hub of which blobs were removed
    read_ahead.read_ahead(read)
    assert read_ahead.read_model(read).parameters == parameters_of(read)


def test_a_tokenizer_that_cannot_be_loaded_is_left_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_ahead", {})
    model = save_tiny_model(tmp_path / "model", seed=1)
    for file in model.glob("tokenizer*"):
        file.unlink()
    read_ahead.read_ahead(str(model))
    with pytest.raises(ModelError):
        read_ahead.read_model(str(model))


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A tokenizer of vLLM that was read ahead, and then the copies that vLLM makes."""
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    from vllm import tokenizers
    from vllm.renderers import hf

    monkeypatch.setattr(read_ahead, "_ahead", {})
    monkeypatch.setattr(hf, "maybe_make_thread_pool", hf.maybe_make_thread_pool)
    model = str(save_tiny_model(tmp_path / "model", seed=1))
    read_ahead.read_ahead(model)
    made: list[Any] = [read_ahead._tokenizer_of_vllm(model)]

    def deepcopy(value: Any) -> Any:
        made.append(copy.deepcopy(value))
        return made[-1]

    monkeypatch.setattr(tokenizers.hf, "copy", SimpleNamespace(copy=copy.copy, deepcopy=deepcopy))
    yield made
    read_ahead._empty_caches_of_vllm()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_vllm_takes_the_copies_of_the_tokenizer_that_were_made_ahead(copies: list[Any]) -> None:
    from vllm.renderers import hf
    from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

    read, rendering = copies[0], copy.copy(copies[0])  # as vLLM's renderer copies it
    hf.maybe_make_thread_pool(rendering, 2)
    assert isinstance(rendering, ThreadSafeHFTokenizerMixin)
    assert rendering.encode("sort 312") == read.encode("sort 312")
    assert copies == [read]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("why", ["a thread more", "a token more", "another end"])
def test_vllm_copies_a_tokenizer_that_is_not_as_it_was_read_ahead(copies: list[Any], why: str) -> None:
    from vllm.renderers import hf
    from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

    rendering = copy.copy(copies[0])
    if why == "a token more":
        rendering.add_tokens(["<more>"])
    elif why == "another end":
        rendering.eos_token = "<unk>"
    num_copies = 3 if why == "a thread more" else 2
    hf.maybe_make_thread_pool(rendering, num_copies)
    assert isinstance(rendering, ThreadSafeHFTokenizerMixin)
    assert len(copies) == 1 + num_copies


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_vllm_starts_no_process_to_look_at_the_class_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    from vllm.model_executor.models import registry

    def in_subprocess(function: Any) -> None:
        raise AssertionError(f"a process for {function}")

    monkeypatch.setattr(registry, "_run_in_subprocess", in_subprocess)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    preloading._import_model_of_vllm(str(save_tiny_model(tmp_path / "model", seed=1)))
    assert registry._run_in_subprocess is in_subprocess
    assert registry.ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls().is_text_generation_model
