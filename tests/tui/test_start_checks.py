"""What `plan`, `doctor` and every start refuse because this machine lacks it, within a second."""

from __future__ import annotations

import errno
import http.server
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ports import free_port

from grpo_engine.models import config as model_config
from grpo_engine.train import config as train_config
from grpo_tui.profile import hub as hub_module
from grpo_tui.profile import start_checks
from grpo_tui.profile.hub import hub_token
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.profile.loading import load
from grpo_tui.profile.start_checks import lacking_needs, needs_of

REWARDS = """
from fractions import Fraction
try:
    import nothing_of_this_name
except ImportError:
    nothing_of_this_name = None
items = [("1 + 1", "2")] * 32
def score(completion, answer): ...
"""


WANDB_PROJECT = "services.trainer.wandb_project=x"
CUDA = ["model.device=cuda", "services.trainer.device=cuda:1", "services.trainer.gpus=[0]"]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with an empty cache of the hub, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for variable in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN_PATH", "HF_ENDPOINT", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(start_checks, "has_gpu_driver", lambda: False)
    monkeypatch.setattr("grpo_engine.installed.has_gpu_driver", lambda: False)


def loaded(folder: Path, *overrides: str) -> LoadedProfile:
    file = folder / "x.toml"
    file.write_text((Path(__file__).parents[2] / "profiles" / "tiny-cpu.toml").read_text())
    return load(str(file), overrides)


def lacking(folder: Path, *overrides: str) -> dict[str, str]:
    """What is lacking, by its key."""
    return dict(lacking_needs(loaded(folder, *overrides)))


def test_the_demo_lacks_nothing(tmp_path: Path) -> None:
    assert lacking(tmp_path) == {}
    assert {"torch", "transformers"} <= {need.text for need in needs_of(loaded(tmp_path))}


@pytest.mark.parametrize(
    ("overrides", "key", "package"),
    [
        (["services.trainer.use_wandb=true", WANDB_PROJECT], "services.trainer.use_wandb", "wandb"),
        (["services.trainer.use_tensorboard=true"], "services.trainer.use_tensorboard", "tensorboard"),
        (["services.trainer.use_trackio=true"], "services.trainer.use_trackio", "trackio"),
        (["services.vllm.engine=vllm"], "services.vllm.engine", "vllm"),
        (["services.env.task=reasoning_gym:chain_sum"], "services.env.task", "reasoning_gym"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_the_setting_that_needs_it(
    overrides: list[str], key: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_checks, "is_installed", lambda module: module != package)
    found = lacking(tmp_path, *overrides)
    assert list(found) == [key]
    assert found[key].startswith(f"{package} is not installed: pip install 'grpo-tui[")


@pytest.mark.parametrize(
    ("version", "words"),
    [(None, "needs bitsandbytes, which is not installed"), ("0.49.2", "runs on a CPU from bitsandbytes 0.50 on")],
)
def test_an_optimizer_that_cannot_run_here_is_named(
    version: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_config, "installed_version", lambda package: version)
    assert words in lacking(tmp_path, "services.trainer.optimizer=adamw_8bit")["services.trainer.optimizer"]


@pytest.mark.parametrize(
    ("device", "has_driver", "optimizer"),
    [("cpu", True, "adamw"), ("auto", False, "adamw"), ("auto", True, "adamw_8bit"), ("cuda", False, "adamw_8bit")],
)
def test_the_default_optimizer_on_a_cpu_needs_no_package(
    device: str, has_driver: bool, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_engine.installed.has_gpu_driver", lambda: has_driver)
    assert train_config.TrainConfig(model_name="m", device=device).optimizer == optimizer


@pytest.mark.parametrize("override", CUDA)
def test_a_gpu_that_is_not_there_is_named_once(override: str, tmp_path: Path) -> None:
    overrides = [override, *(["services.trainer.device=auto"] if "gpus" in override else [])]
    [(key, text)] = lacking(tmp_path, *overrides, "services.trainer.optimizer=adamw").items()
    assert key == override.partition("=")[0]
    assert "no GPU driver is loaded here" in text


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("jsonl:none.jsonl", "task.path: {folder}/none.jsonl cannot be read: No such file or directory"),
        ("jsonl:broken.jsonl", "task.path: {folder}/broken.jsonl:2: not JSON: "),
        ("jsonl:other.jsonl", "task.path: {folder}/other.jsonl:1: no field 'question' (did you mean 'questions'?)"),
        ("gsm8k:none", "task.path: {folder}/none cannot be read"),
        ("ifeval:none.jsonl", "task.path: {folder}/none.jsonl cannot be read"),
        ("python:none:score", "task.functions: there is no module 'none', neither in {folder} nor installed"),
        ("python:rewardz:score", "task.functions: there is no module 'rewardz' (did you mean 'rewards'?)"),
        ("python:json.none:score", "task.functions: there is no module 'json.none'"),
        ("python:none.py:score", "task.functions: there is no file {folder}/none.py"),
        ("python:rewards:scor", "task.functions: rewards ({folder}/rewards.py) has no 'scor' (did you mean 'score'?)"),
        ("python:faulty:score", "task.functions: faulty cannot be imported: SyntaxError: "),
        ("python:lacking:score", "task.functions: lacking cannot be imported: there is no module 'no_such_package'"),
        ("python:no_items:score", "task.items_from: no_items ({folder}/no_items.py) has no 'items'"),
        ('{ name = "python:rewards:score", path = "none.jsonl" }', "task.path: {folder}/none.jsonl cannot be read"),
    ],
)
def test_a_file_or_module_of_a_task_that_does_not_load_is_named(task: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"question": "q", "answer": "a"}\n{"question\n')
    (tmp_path / "other.jsonl").write_text('{"questions": "q", "answer": "a"}\n')
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "no_items.py").write_text(REWARDS.replace("items", "questions"))
    (tmp_path / "faulty.py").write_text("def score(completion) return 1\n")
    (tmp_path / "lacking.py").write_text(f"import no_such_package.part\n{REWARDS}")
    [(key, text)] = lacking(tmp_path, f"services.env.task={task}").items()
    assert f"{key}: {text}".startswith(f"services.env.{words.format(folder=tmp_path)}")


def test_a_module_in_the_folder_of_the_shell_is_found_where_set_names_it_else_named_with_the_path_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed profile is in another folder, and the modules that it names are looked for beside it."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.py").write_text(REWARDS)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])  # workers of pytest have this one
    for module in ("mine", f"{here}/mine.py"):
        assert lacking(tmp_path, f"services.env.task=python:{module}:score") == {}
    file = tmp_path / "x.toml"
    file.write_text(file.read_text().replace('task = "sort6"', 'task = "python:mine:score"'))
    [(_, text)] = lacking_needs(load(str(file)))
    assert text.endswith(f"or write {here}/mine.py for the file that is here")


@pytest.mark.parametrize(
    "task", ["python:rewards:score", "python:./rewards.py:score", "python:made:any", "python:elsewhere:score"]
)
def test_a_module_whose_source_does_not_show_its_names_is_left_to_the_environment(task: str, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "made.py").write_text("def __getattr__(name): ...\n")
    (tmp_path / "elsewhere.py").write_text('import sys\nsys.path.append("lib")\nimport my_lib\n')
    assert lacking(tmp_path, f"services.env.task={task}") == {}


def test_a_check_runs_nothing_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(f"open('has-run', 'w')\n{REWARDS}")
    assert lacking(tmp_path, "services.env.task=python:rewards:score") == {}
    assert not (tmp_path / "has-run").exists()


def test_modules_are_also_found_on_the_pythonpath_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "away.py").write_text(f"import beside_it\n{REWARDS}")
    (tmp_path / "lib" / "beside_it.py").touch()
    (tmp_path / "x.env").write_text("PYTHONPATH=lib\n")
    task = "services.env.task=python:away:score"
    assert "no module 'away'" in lacking(tmp_path, task)["services.env.task.functions"]
    for path in (f"{tmp_path}/none:{tmp_path}/lib", "lib"):
        assert lacking(tmp_path, task, f"services.env.env.PYTHONPATH={path}") == {}
        [text] = lacking(tmp_path, f"{task[:-1]}", f"services.env.env.PYTHONPATH={path}").values()
        assert "has no 'scor' (did you mean 'score'?)" in text
    assert lacking(tmp_path, task, 'services.env.env_files=["x.env"]') == {}


def test_a_curriculum_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = lacking(tmp_path, "services.env.curriculum=python:none:Order")
    assert list(found) == ["services.env.curriculum"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[str]]]:
    """A hub that answers with this status; returns the paths that were asked for."""
    servers: list[http.server.ThreadingHTTPServer] = []
    monkeypatch.setattr(hub_module, "LIMIT_S", 60.0)  # of an answer that a busy machine has late the status counts too

    def serve(status: int) -> list[str]:
        asked: list[str] = []

        class Hub(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                asked.append(self.path)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), Hub)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        return asked

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "words"),
    [(200, None), (307, None), (503, None), (404, "answers 404"), (401, "no token is set")],
)
def test_a_model_that_is_not_in_the_cache_is_asked_for_at_the_hub(
    status: int, words: str | None, hub: Callable[[int], list[str]], tmp_path: Path
) -> None:
    asked = hub(status)
    found = lacking(tmp_path, "model.name=owner/model")
    assert asked == ["/owner/model/resolve/main/config.json"]
    assert list(found) == ([] if words is None else ["model.name"])
    assert words is None or words in found["model.name"]


def test_a_token_with_a_line_end_is_sent_without_it_and_shown_in_no_message(
    hub: Callable[[int], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file of Windows leaves it in a variable. Before, the start was refused, with the token in the message."""
    monkeypatch.setenv("HF_TOKEN", "hf_SECRET\r")
    assert hub_token() == "hf_SECRET"
    asked = hub(200)
    assert lacking(tmp_path, "model.name=owner/model") == {}
    assert len(asked) == 1


def test_a_hub_that_cannot_be_reached_is_an_error_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    found = lacking(tmp_path, "model.name=owner/model", "services.env.task=gsm8k")
    assert list(found) == ["model.name", "services.env.task.path"]
    assert "owner/model is not completely in the hub's cache, and http://127.0.0.1:" in found["model.name"]
    assert "cannot be reached (Connection refused): give a folder, or set HF_HOME" in found["model.name"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in lacking(tmp_path, "model.name=owner/model")["model.name"]
    download(tmp_path, "config.json", "model.safetensors")
    assert lacking(tmp_path, "model.name=owner/model") == {}


def download(folder: Path, *files: str) -> Path:
    """Put files of owner/model into the cache, beside what a killed download left; returns their folder."""
    cached = folder / "hub" / "hub" / "models--owner--model"
    snapshot = cached / "snapshots" / "abc"
    for made in (snapshot, cached / "blobs", cached / "refs"):
        made.mkdir(parents=True, exist_ok=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "blobs" / "1234.5678.incomplete").touch()
    for name in files:
        (snapshot / name).touch()
    return snapshot


def test_an_interrupted_download_does_not_count_as_cached(hub: Callable[[int], list[str]], tmp_path: Path) -> None:
    def shown() -> list[str]:
        return [need.text for need in needs_of(loaded(tmp_path, "model.name=owner/model")) if need.id == "model"]

    hub(200)
    snapshot = download(tmp_path, "config.json", "model-1-of-2.safetensors")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    for text in (None, "{", json.dumps(index)):
        if text is not None:
            (snapshot / "model.safetensors.index.json").write_text(text)
        [shown_text] = shown()
        assert shown_text.startswith("owner/model is partly in the hub's cache; the hub is reached")
    (snapshot / "model-2-of-2.safetensors").touch()
    assert shown() == ["owner/model is in the hub's cache"]


@pytest.mark.parametrize(
    ("error", "is_refused"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), True),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), False),
        (TimeoutError("timed out"), False),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), False),
    ],
)
def test_only_an_error_that_is_certain_refuses_a_start(
    error: OSError, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object, **__: object) -> socket.socket:
        raise error

    monkeypatch.setattr(hub_module.socket, "create_connection", connect)
    profile = loaded(tmp_path, "model.name=owner/model")
    assert [fault.key for fault in lacking_needs(profile)] == (["model.name"] if is_refused else [])
    [need] = [need for need in needs_of(profile) if need.id == "model"]
    assert need.hint.startswith("give a folder")


def test_a_hub_that_answers_late_counts_as_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "LIMIT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert lacking(tmp_path, "model.name=owner/model") == {}


def test_a_service_with_a_hub_of_its_own_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert lacking(tmp_path, "model.name=owner/model", "services.vllm.env.HF_TOKEN=x") == {}


@pytest.mark.parametrize("is_there", [False, True])
def test_ray_is_a_need_of_a_profile_with_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(start_checks, "has_ray", lambda: is_there)
    profile = load(str(Path(__file__).parents[2] / "profiles" / "tiny-ray.toml"))
    words = "needs Ray, which is not installed: pip install 'grpo-tui[ray]'"
    assert dict(lacking_needs(profile)) == ({} if is_there else {"cluster.kind": words})
    assert ("ray" in [need.text for need in needs_of(profile) if need.is_met]) == is_there
    assert all(need.key != "cluster.kind" for need in needs_of(loaded(tmp_path)))


def test_what_two_services_need_by_one_setting_is_named_once(tmp_path: Path) -> None:
    keys = [need.key for need in needs_of(loaded(tmp_path, "model.device=cuda")) if not need.is_met]
    assert keys == ["model.device"]
