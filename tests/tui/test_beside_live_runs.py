"""What a start says of live runs: the GPUs that they use, the files that they write, and how their settings differ.

Live runs are folders whose lock this process holds; facts of the driver are written here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launches import launch

from grpo_tui.client import second_run
from grpo_tui.client.gpu_leases import Crowd, crowd_on, refusal_of_gpus, require_gpus
from grpo_tui.client.local import Run, StartRefused
from grpo_tui.client.second_run import LiveRun, differences, live_runs_of, require_own_files, require_own_ports
from grpo_tui.profile.loaded import resolved
from grpo_tui.profile.loading import load
from grpo_tui.profile.plan import make_plan
from grpo_tui.profile.plan_file import Plan
from grpo_tui.supervisor.keeper.owners import Owner
from grpo_tui.supervisor.keeper.proc import Marker
from grpo_tui.supervisor.lock import take_lock
from grpo_tui.supervisor.preflight import Gpu, GpuHolder
from grpo_tui.supervisor.usage.gpus import GpuMemory

GB = 10**9
TWO_GPUS = {0: "GPU-0", 1: "GPU-1"}


def holder(pid: int, held_bytes: int, mark: Marker | None, *, is_live: bool = True) -> GpuHolder:
    owner = Owner(process=None, uid=0, command="", mark=mark, is_supervised=is_live)
    return GpuHolder(gpu=0, pid=pid, memory_bytes=held_bytes, owner=owner)


def gpu(*holders: GpuHolder) -> Gpu:
    used = sum(each.memory_bytes or 0 for each in holders)
    shares = {each.pid: each.memory_bytes for each in holders}
    memory = GpuMemory(
        index=0, uuid="GPU-0", name="H100", free_bytes=80 * GB - used, used_bytes=used, bytes_by_pid=shares
    )
    return Gpu(memory=memory, holders=holders)


@pytest.fixture(autouse=True)
def _no_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of other tests on this machine are none of ours."""
    monkeypatch.setattr(second_run, "run_folders_anywhere", set)


def words(crowd: Crowd | None) -> str:
    assert crowd is not None
    return crowd.words


def mark(run: str, service: str) -> Marker:
    return Marker(run=run, service=service, run_folder=f"/logs/{run}")


def live(run: str, *services: object) -> LiveRun:
    plan = Plan(profile_name="p", profile_folder=Path("/"), launches=tuple(services))  # type: ignore[arg-type]
    return LiveRun(run=Run(folder=Path("/logs") / run, has_daemon=True, has_services=True), plan=plan)


def test_a_gpu_that_other_runs_use_is_named_with_each_share_and_what_is_left() -> None:
    held = (
        holder(1, 36 * GB, mark("p-1", "vllm")),
        holder(2, 10 * GB, mark("p-1", "trainer")),
        holder(3, 10 * GB, mark("p-1", "trainer")),
        holder(4, 4 * GB, mark("elsewhere-1", "vllm")),
        holder(5, 4 * GB, None),
        holder(6, 4 * GB, mark("ended-1", "vllm"), is_live=False),
    )
    assert words(crowd_on(gpu(*held), [], TWO_GPUS)) == (
        "GPU 0 is used by run p-1 (vllm 36.0 GB, trainer 20.0 GB) and run elsewhere-1 (vllm 4.0 GB); "
        "12.0 of 80.0 GB (15%) are free"
    )


def test_a_run_that_has_taken_no_memory_yet_counts_by_its_plan() -> None:
    starting = live("p-1", launch("vllm", gpus=(0,), gpu_memory_share=0.45), launch("trainer", gpus=(0,)))
    beside = live("p-2", launch("vllm", gpus=(1,), gpu_memory_share=0.45), launch("api"))
    elsewhere = live("p-3", launch("vllm", env={"CUDA_VISIBLE_DEVICES": "1"}, gpu_memory_share=0.45))
    assert words(crowd_on(gpu(), [starting, beside, elsewhere], TWO_GPUS)) == (
        "GPU 0 is used by run p-1 (vllm 45% requested, trainer); 80.0 of 80.0 GB (100%) are free"
    )


def test_a_gpu_that_no_live_run_uses_is_not_named() -> None:
    beside = [live("p-2", launch("vllm", gpus=(1,)), launch("api"))]
    assert crowd_on(gpu(holder(5, 4 * GB, None)), beside, TWO_GPUS) is None
    assert crowd_on(0, beside, {}) is None


def test_without_a_driver_gpus_are_compared_by_their_numbers() -> None:
    theirs = [live("p-1", launch("vllm", gpus=(0,), gpu_memory_share=0.45), launch("trainer", gpus=(0, 1)))]
    assert words(crowd_on(0, theirs, {})) == "GPU 0 is used by run p-1 (vllm 45% requested, trainer)"
    own = live("p-2", launch("vllm", gpus=(0,), gpu_memory_share=0.6)).plan
    crowd = crowd_on(0, theirs, {}, own)
    assert crowd is not None
    assert crowd.excess == "GPU 0: run p-1 (vllm 45%, trainer) and this start (vllm 60%) come to 105%"


def test_memory_that_is_planned_above_the_card_is_refused_with_its_parts_also_where_the_gpu_is_shared() -> None:
    held = (holder(1, 30 * GB, mark("p-1", "vllm")), holder(2, 20 * GB, mark("p-1", "trainer")))
    theirs = [live("p-1", launch("vllm", gpus=(0,), gpu_memory_share=0.45), launch("trainer", gpus=(0,)))]

    def crowd(**own: object) -> Crowd:
        plan = live("p-2", launch("vllm", gpus=(0,), **own), launch("trainer", gpus=(0,))).plan
        found = crowd_on(gpu(*held), theirs, TWO_GPUS, plan)
        assert found is not None
        return found

    fitting = crowd(gpu_memory_bytes=24 * GB)
    assert fitting.excess is None
    require_gpus([fitting], shares=True)
    above = crowd(gpu_memory_bytes=25 * GB)
    parts = "run p-1 (vllm 45%, trainer 20.0 GB) and this start (vllm 25.0 GB) come to 81.0 of 80.0 GB"
    assert above.excess == f"GPU 0: {parts}"
    with pytest.raises(StartRefused, match=r"come to 81\.0 of 80\.0 GB\nplan less memory"):
        require_gpus([above], shares=True)
    with pytest.raises(StartRefused, match=r"GPU 0 is used by run p-1 (.|\n)*--queue waits"):
        require_gpus([fitting], shares=False)


def test_the_refusal_names_what_helps_and_that_joining_does_not() -> None:
    refused = refusal_of_gpus(["GPU 0 is used by run p-1 (vllm 36.0 GB)"])
    assert "--new starts this run beside it, in what is left" in str(refused)
    assert refused.choices == ("new",)


STACK = """
[model]
name = "local/tiny"
max_model_len = 64
[services.api]
kind = "rollout_api"
store = "groups.sqlite"
[services.trainer]
kind = "trainer"
training_steps = 10
save_path = "/kept/checkpoints"
"""


@contextmanager
def live_run(folder: Path, *overrides: str) -> Iterator[Path]:
    """A profile, and a live run of it with overrides, in `logs` beside it."""
    path = folder / "p.toml"
    path.write_text(STACK)
    loaded = load(str(path), overrides)
    run = folder / "logs" / "p-1123-000000-abcd"
    run.mkdir(parents=True)
    (run / "plan.json").write_text(make_plan(loaded, run_folder=run, python="python").to_json())
    (run / "resolved.json").write_text(json.dumps(resolved(loaded)))
    lock = take_lock(run)
    assert lock is not None
    yield path
    os.close(lock)


def test_settings_are_compared_by_value_and_those_that_follow_from_another_are_left_out(tmp_path: Path) -> None:
    with live_run(tmp_path, "services.trainer.lr=1e-6") as path:

        def compared(*overrides: str) -> list[str]:
            loaded = load(str(path), overrides)
            (live,) = live_runs_of(loaded, tmp_path / "logs")
            return differences(live, loaded)

        assert compared("services.trainer.lr=0.000001") == []
        assert compared("services.trainer.lr=1e-6", "model.max_model_len=32") == [
            "model.max_model_len: 64 there, 32 here"
        ]
        assert compared("services.trainer.lr=1e-6", "services.api.port=8010") == [
            "services.api.port: 8000 there, 8010 here"
        ]
        assert compared("services.trainer.lr=1e-6", "services.trainer.seq_len=32") == [
            "services.trainer.seq_len: 64 there, 32 here"
        ]


def test_a_setting_that_an_earlier_version_did_not_have_is_no_difference(tmp_path: Path) -> None:
    with live_run(tmp_path) as path:
        loaded = load(str(path))
        (live,) = live_runs_of(loaded, tmp_path / "logs")
        resolved_file = live.run.folder / "resolved.json"
        document = json.loads(resolved_file.read_text())
        del document["services"]["trainer"]["log_limit_mb"]
        resolved_file.write_text(json.dumps(document))
        assert differences(live, loaded) == []
        document["services"]["trainer"]["of_another_version"] = 1
        resolved_file.write_text(json.dumps(document))
        assert differences(live, loaded) == ["services.trainer.of_another_version: unknown setting"]


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        ([], "services.api.store"),
        (["services.api.store=other.sqlite"], "services.trainer.save_path"),
        (["services.api.store=other.sqlite", "services.trainer.save_path=here"], None),
    ],
)
def test_two_live_runs_write_no_file_in_common(tmp_path: Path, overrides: list[str], setting: str | None) -> None:
    with live_run(tmp_path) as path:
        loaded = load(str(path), overrides)
        if setting is None:
            require_own_files(loaded, tmp_path / "logs")
            return
        with pytest.raises(StartRefused, match=f"{setting}: .* belongs to run p-1123-000000-abcd, which is live"):
            require_own_files(loaded, tmp_path / "logs")


@pytest.mark.parametrize(
    ("is_resumed", "choices", "help"),
    [
        (False, ("new",), "--new starts the run on free ports"),
        (True, (), "--set services.NAME.port=N takes another port"),
    ],
)
def test_ports_of_a_live_run_of_another_profile_are_refused_with_what_takes_others(
    tmp_path: Path, is_resumed: bool, choices: tuple[str, ...], help: str
) -> None:
    with live_run(tmp_path) as path:
        loaded = load(str(path))
        with pytest.raises(StartRefused, match="of run p-1123-000000-abcd, which is live") as refused:
            require_own_ports(loaded, tmp_path / "logs", is_resumed=is_resumed)
    assert refused.value.choices == choices
    assert str(refused.value).splitlines()[-1] == f"`grpo-tui down RUN` ends it; {help}"


def test_a_live_branch_is_not_joined_as_a_run_of_the_profile_of_its_parent(tmp_path: Path) -> None:
    with live_run(tmp_path) as path:
        (live,) = live_runs_of(load(str(path)), tmp_path / "logs")
        (live.run.folder / "parent.json").write_text('{"run": "p-1123-000000-aaaa", "step": 5}')
        assert list(live_runs_of(load(str(path)), tmp_path / "logs")) == []
