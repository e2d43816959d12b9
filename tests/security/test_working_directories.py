"""A working directory that other users may write to: no module is taken from it, and no settings of wandb."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from stage import Stage

from grpo_engine import aliases
from grpo_engine.cli import _close_to_others, _compiled_code
from grpo_engine.environments.tasks.python.loading import load_attribute
from grpo_engine.errors import ConfigError, GrpoError, ModelError
from grpo_engine.models.local import cache_folder
from grpo_engine.python_command import module_command
from grpo_engine.trackers import set_up_wandb
from grpo_tui.client.launch import starting
from grpo_tui.client.local import NoSuchRun, find_run, lost_runs
from grpo_tui.paths import available_profiles
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import make_plan
from grpo_tui.supervisor import temporary
from grpo_tui.sweeps.folder import find_sweep

REPOSITORY = Path(__file__).parents[2]
STACK = """
[services.api]
kind = "rollout_api"
[services.vllm]
kind = "inference"
model_name = "local/tiny"
[services.env]
kind = "environment"
task = "sort6"
model_name = "local/tiny"
[services.stock]
kind = "atropos_environment"
model_name = "local/tiny"
file = "env.py"
python = "python"
[services.trainer]
kind = "trainer"
model_name = "local/tiny"
"""


def test_a_module_beside_the_profile_does_not_take_the_place_of_an_installed_one(tmp_path: Path) -> None:
    (tmp_path / "grpo_engine").mkdir()
    for name in ("grpo_engine/__init__.py", "grpo_engine/__main__.py", "argparse.py"):
        (tmp_path / name).write_text("raise SystemExit('code of another user')\n")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = module_command("grpo_engine", "--help")
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_services_of_a_plan_take_no_modules_from_their_working_directory(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(STACK)
    plan = make_plan(load(str(tmp_path / "p.toml")), run_folder=tmp_path / "run", python=sys.executable)
    begins = {launch.name: launch.argv[:4] for launch in plan.launches}
    assert begins == dict.fromkeys(begins, (sys.executable, "-P", "-m", "grpo_engine"))


def test_ray_is_not_used_in_the_folder_of_the_profile(tmp_path: Path) -> None:
    """It puts the working directory of its driver first on the path of modules of all workers: `-P` does not help."""
    cluster = (
        '[cluster]\nkind = "ray"\nmachines = 1\n[services.a]\nkind = "command"\nargv = ["true"]\nnum_devices = 1\n'
    )
    (tmp_path / "p.toml").write_text(cluster)
    plan = make_plan(load(str(tmp_path / "p.toml")), run_folder=tmp_path / "run", python=sys.executable)
    folders = {launch.name: launch.cwd for launch in plan.launches}
    assert folders == {"ray": Path("/"), "machines": Path("/"), "a": tmp_path}


def test_every_command_line_of_our_modules_is_made_in_one_place() -> None:
    files = [file for package in ("grpo_engine", "grpo_tui") for file in (REPOSITORY / package).rglob("*.py")]
    texts = {file.name: text for file in files if '"-m"' in (text := file.read_text())}
    assert {name for name, text in texts.items() if "sys.executable" in text or ".python" in text} == {
        "python_command.py"
    }


def test_the_process_that_compares_expressions_takes_no_modules_from_an_open_folder(tmp_path: Path) -> None:
    libraries, here = tmp_path / "libraries", tmp_path / "here"
    for folder in (libraries, here):
        folder.mkdir()
    (libraries / "math_verify.py").write_text(
        "def parse(text, **_): return text.replace('+0', '')\ndef verify(gold, answer, **_): return gold == answer\n"
    )
    here.chmod(0o1777)
    for name in ("multiprocessing", "math_verify", "grpo_engine", "signal", "logging", "select"):
        (here / name).mkdir()
        (here / name / "__init__.py").write_text("open('taken', 'a').write(__name__)\n")
    code = (
        "import sys; sys.path.remove('')\n"  # as in an installed program, whose own folder is first
        "from grpo_engine.environments.tasks.answers import is_same_answer\n"
        "print(is_same_answer('x', 'y'), is_same_answer('x', 'x+0'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=here,
        env={**os.environ, "PYTHONPATH": f"{libraries}:{REPOSITORY}", "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not (here / "taken").exists()
    assert (done.stdout, done.stderr) == ("False True\n", "")


@pytest.fixture
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONSAFEPATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "before")
    monkeypatch.setattr(os, "umask", lambda mask: 0)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(("command", "value"), [("server", "1"), ("train", "1"), ("api", "1"), ("env", "before")])
def test_interpreters_that_torch_and_vllm_start_take_no_modules_from_there_either(command: str, value: str) -> None:
    _close_to_others(command)
    assert os.environ["PYTHONSAFEPATH"] == value


def test_the_programs_named_as_in_atropos_close_their_files_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr("grpo_engine.cli._close_to_others", closed.append)
    monkeypatch.setattr(sys, "argv", ["run-api", "--no-such-flag"])
    with contextlib.suppress(SystemExit):
        aliases.run_api()
    assert closed == ["api"]


@pytest.mark.parametrize(
    ("open_to_others", "is_read"), [(None, True), (".", False), ("wandb", False)], ids=["own", "folder", "settings"]
)
def test_wandb_reads_no_settings_that_another_user_could_write(
    open_to_others: str | None, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, run_folder = tmp_path / "here", tmp_path / "run"
    run_folder.mkdir()
    (here / "wandb").mkdir(parents=True, mode=0o755)
    (here / "wandb" / "settings").write_text("[default]\nbase_url = https://elsewhere.example\n")
    for folder in (here, here / "wandb"):
        folder.chmod(0o755)
    if open_to_others is not None:
        (here / open_to_others).chmod(0o1777)
    monkeypatch.chdir(here)
    loaded_in: list[Path] = []
    set_up_wandb(SimpleNamespace(setup=lambda: loaded_in.append(Path.cwd())), run_folder)
    assert loaded_in == ([] if is_read else [run_folder])
    assert Path.cwd() == here


@pytest.mark.parametrize("mode", [0o700, 0o1777], ids=["own", "open"])
def test_a_module_of_a_task_is_found_and_a_library_is_not_replaced_beside_it_by_other_users(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(mode)
    (tmp_path / "rewards_beside.py").write_text("import helper_beside\nfrom helper_beside import score\n")
    (tmp_path / "helper_beside.py").write_text("def score(completion): return 1.0\n")
    (tmp_path / "httpx.py").touch()
    assert load_attribute("rewards_beside", "score", where="task.functions")("x") == 1.0
    spec = importlib.machinery.PathFinder.find_spec("httpx")
    assert spec is not None
    assert (spec.origin == str(tmp_path / "httpx.py")) == (mode == 0o700)
    for name in ("rewards_beside", "helper_beside"):
        del sys.modules[name]


def test_an_empty_entry_of_a_search_path_does_not_make_the_working_directory_of_a_service_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`export PYTHONPATH=$PYTHONPATH:/mine` makes one, and Python searches the working directory, with `-P` too."""
    (tmp_path / "sitecustomize.py").write_text("print('code of another user')\n")
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{REPOSITORY}")
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep)
    words = [sys.executable, "-P", "-c", "import os; print(os.environ['PYTHONPATH'], 'LD_LIBRARY_PATH' in os.environ)"]

    async def run() -> None:
        stage = Stage(folder=tmp_path, run="empty-entries", token="none")
        await (await stage.start(*words)).exited()

    asyncio.run(run())
    assert (tmp_path / "a.log").read_text().splitlines()[1:] == [f"{REPOSITORY} False"]


def test_without_a_home_compiled_code_is_not_taken_from_where_another_user_can_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no-folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-folder"))
    monkeypatch.setenv("USER", "me")
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", {**os.environ})
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    theirs = tmp_path / "torchinductor_me"  # torch's own folder for user `me`
    theirs.mkdir()
    monkeypatch.setattr(temporary, "ALWAYS_SHORT", tmp_path)
    folder = temporary.make_folder("no-home")
    assert temporary.variables(folder) == {"TMPDIR": str(folder)}
    assert not os.path.lexists(folder / "torchinductor_me")
    folder.rmdir()  # where `tmp_path` is too long for sockets, it lies outside
    monkeypatch.setattr(os, "umask", lambda _: 0o022)
    _close_to_others("train")
    own = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert own != theirs
    assert (own.parent, own.stat().st_mode & 0o777) == (tmp_path, 0o700)


def test_a_profile_that_another_user_put_beside_us_is_not_started_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a working directory such as /tmp, where anybody can make `profiles` first."""
    monkeypatch.chdir(tmp_path)
    Path("profiles").mkdir()
    mine, theirs = Path("profiles/mine.toml"), Path("profiles/tiny-cpu.toml")
    for file in (mine, theirs):
        file.write_text('[services.a]\nkind = "command"\nargv = ["/bin/sh", "-c", "id"]\n')
    theirs.chmod(0o666)
    assert load("mine").path == mine
    assert available_profiles()["tiny-cpu"] != theirs
    with pytest.raises(ConfigError, match=r"'tiny-cpu': profiles/tiny-cpu\.toml or its folder belongs to another user"):
        load("tiny-cpu")
    assert load("profiles/tiny-cpu.toml").path == theirs  # whoever names the file has chosen it


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
@pytest.mark.parametrize("taken", ["profiles", "profiles/mine.toml"])
def test_a_profile_in_a_folder_of_another_user_is_not_started_by_its_name(
    taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("profiles").mkdir()
    Path("profiles/mine.toml").write_text("")
    os.chown(taken, 65534, 65534)
    tmp_path.chmod(0o1777)
    assert "mine" not in available_profiles()
    with pytest.raises(ConfigError, match="start it by its path"):
        load("mine")
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ConfigError, match="start it by its path"):
        load("mine")
    tmp_path.chmod(0o755)  # a folder of the host, in a container
    assert "mine" in available_profiles()


def test_a_co_located_trainer_takes_no_configuration_that_others_may_write(tmp_path: Path) -> None:
    file = tmp_path / aliases.COLOCATED_CONFIG
    file.parent.mkdir()
    file.write_text("environment: {task: {name: python, module: evil}}\n")
    assert aliases.colocated_defaults([], tmp_path) == ["--config", str(aliases.COLOCATED_CONFIG)]
    file.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="name it with --config"):
        aliases.colocated_defaults([], tmp_path)
    assert aliases.colocated_defaults(["--config", str(file)], tmp_path) == []


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_compiled_code_is_not_taken_from_a_cache_that_every_user_may_fill(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch unpickles what it finds there: with XDG_CACHE_HOME=/scratch/cache another user's code ran."""
    base = tmp_path / "scratch"
    cache = base / "grpo-engine"
    cache.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert temporary.variables(tmp_path)["TORCHINDUCTOR_CACHE_DIR"] == str(cache / "inductor")
    assert _compiled_code("inductor") == cache / "inductor"
    (base if mode == 0o777 else cache).chmod(mode)  # in a sticky folder ours cannot be replaced
    assert temporary.variables(tmp_path) == {"TMPDIR": str(tmp_path)}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert _compiled_code("inductor").parent == tmp_path
    with pytest.raises(ModelError, match=r"all users may write to .*: set XDG_CACHE_HOME"):
        cache_folder(os.environ)
    base.chmod(0o1777)
    cache.chmod(0o700)
    assert cache_folder(os.environ) == cache


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_cache_that_another_user_made_first_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "grpo-engine").mkdir()
    os.chown(tmp_path, 65534, 65534)  # as ~/.cache of the host is in a container
    assert cache_folder(os.environ) == tmp_path / "grpo-engine"
    os.chown(tmp_path / "grpo-engine", 65534, 65534)
    with pytest.raises(ModelError, match="belongs to user 65534"):
        cache_folder(os.environ)


def test_a_loop_of_links_in_place_of_a_folder_ends_no_command_with_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python before 3.13 raises RuntimeError where `Path.resolve` finds one."""
    monkeypatch.chdir(tmp_path)
    for name in ("logs", "folder", "rewards.py"):
        Path(name).symlink_to(name)
    Path("p.toml").write_text("[services.a]\nkind = 'command'\nargv = ['true']\ncwd = 'folder'\n")
    plan = make_plan(load("p.toml"), run_folder=tmp_path, python="")
    assert [each.cwd for each in plan.launches] == [tmp_path / "folder"]
    Path("stack.toml").write_text(STACK.replace("local/tiny", "./folder"))
    with pytest.raises(ConfigError, match="is neither a folder"):
        load("stack.toml")
    with pytest.raises(ConfigError, match=r"rewards\.py"):
        load_attribute("rewards.py", "score", where="task")
    with pytest.raises(GrpoError, match="the folder of runs, cannot be used"), starting(Path("logs")):
        pass
    for prefix in ("r", None):
        with pytest.raises(NoSuchRun, match="logs"):
            find_run(prefix, Path("logs"), also_ended=True)
        with pytest.raises(NoSuchRun, match="logs"):
            find_sweep(prefix, Path("logs"))
    assert lost_runs(Path("logs")) == set()
