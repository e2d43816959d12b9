"""Hooks with real processes: what they are told, in which order they run, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from stage import FAMILY, HOLDER, Stage, free_ports, is_open, open_stage, python, until

from grpo_engine.wire.run_folder import KEEPERS
from grpo_engine.wire.supervisor import RunState, RunStatus, ServiceState, ServiceStatus
from grpo_tui.services.hook import Hook, HookEvent
from grpo_tui.supervisor.hooks import MAX_WAITING, Hooks
from grpo_tui.supervisor.keeper.proc import processes_of_run

TELLER = """
import json, os, sys
print(json.dumps({"cwd": os.getcwd(), "stdin": sys.stdin.read(), "session": os.getsid(0) != int(sys.argv[1]),
    **{name: value for name, value in os.environ.items() if name.startswith("GRPO_TUI_")}}))
"""
"""Says what it was told; its argument is the session of the one who started it."""

PAIR = """
import os, sys, time
name, marks = os.environ["GRPO_TUI_HOOK_SERVICE"], sys.argv[1]
open(f"{marks}/{name}.up", "w")
print(name, "begins", flush=True)
while not os.path.exists(f"{marks}/{name}.go"): time.sleep(0.005)
print(name, "ends", flush=True)
"""
"""Begins, waits to be let go, ends."""

DAEMON = """
import asyncio, os, signal, sys
from pathlib import Path
from grpo_engine.wire.supervisor import RunState, RunStatus
from grpo_tui.services.hook import Hook, HookEvent
from grpo_tui.supervisor.hooks import Hooks
async def main():
    run, folder, up, *argv = sys.argv[1:]
    hook = Hook(on=[HookEvent.FINISHED], argv=argv)
    hooks = Hooks([hook], run=run, run_folder=Path(folder), cwd=Path(folder), notice=print)
    status = RunStatus(run=run, profile="p", state=RunState.FINISHED, supervisor=None, services=[])
    hooks.fire(HookEvent.FINISHED, service=None, status=status)
    while not Path(up).exists(): await asyncio.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
"""A daemon that starts a hook and is killed."""


@dataclass(kw_only=True)
class Bell:
    """Hooks on a stage, and what a person is told of them."""

    stage: Stage
    notices: list[tuple[str, str, str | None]] = field(default_factory=list)

    def hooks(self, *hooks: Hook) -> Hooks:
        return Hooks(
            hooks,
            run=self.stage.run,
            run_folder=self.stage.folder,
            cwd=self.stage.folder / "profile",
            notice=lambda *notice: self.notices.append(notice),
        )

    def log(self) -> list[str]:
        path = self.stage.folder / "hooks.log"
        return path.read_text().splitlines() if path.exists() else []

    def output(self) -> list[str]:
        """What hooks printed, without the lines that open their runs."""
        return [line for line in self.log() if line and not line.startswith("===")]

    def let_go(self, name: str) -> None:
        (self.stage.folder / f"{name}.go").touch()

    def is_up(self, name: str) -> bool:
        return (self.stage.folder / f"{name}.up").exists()


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Bell]:
    (tmp_path / "profile").mkdir()
    with open_stage(tmp_path) as stage:
        yield Bell(stage=stage)


def service(name: str = "trainer", **changes: object) -> ServiceStatus:
    values = {"kind": "command", "state": ServiceState.FAILED, "attempt": 2, "exit_code": 3, "why": "exit code 3"}
    return ServiceStatus(name=name, log=f"{name}.log", **{**values, **changes})


def status(*services: ServiceStatus, state: RunState = RunState.RUNNING) -> RunStatus:
    return RunStatus(run="r", profile="p", state=state, supervisor=None, services=list(services))


def hook(*argv: str, on: tuple[HookEvent, ...] = (HookEvent.FAILED,), **settings: object) -> Hook:
    return Hook(on=on, argv=argv, **settings)


async def test_a_hook_is_told_what_happened_to_which_service_of_which_run(bell: Bell) -> None:
    hooks = bell.hooks(hook(*python(TELLER, os.getsid(0), bell.stage.token)))
    failed = service(why="exit code 3; last lines:\n  bo\0om")
    hooks.fire(HookEvent.FAILED, service=failed, status=status(failed))
    await hooks.finish(20.0)
    told = json.loads(bell.output()[0])
    assert told == {
        "cwd": str(bell.stage.folder / "profile"),
        "stdin": "",
        "session": True,
        "GRPO_TUI_RUN": bell.stage.run,
        "GRPO_TUI_RUN_FOLDER": str(bell.stage.folder),
        "GRPO_TUI_SERVICE": "hooks",
        "GRPO_TUI_ATTEMPT": "1",
        "GRPO_TUI_HOOK_EVENT": "failed",
        "GRPO_TUI_HOOK_SERVICE": "trainer",
        "GRPO_TUI_HOOK_ATTEMPT": "2",
        "GRPO_TUI_HOOK_STATE": "failed",
        "GRPO_TUI_HOOK_WHY": "exit code 3; last lines:\n  boom",
        "GRPO_TUI_HOOK_EXIT_CODE": "3",
    }
    assert bell.notices == []


async def test_a_hook_on_the_end_of_a_run_is_told_which_services_failed(bell: Bell) -> None:
    hooks = bell.hooks(hook(*python(TELLER, 0, bell.stage.token)))
    services = (service("a"), service("b", state=ServiceState.STOPPED, why="stopped by request"))
    hooks.fire(HookEvent.FAILED, service=None, status=status(*services, state=RunState.FAILED))
    await hooks.finish(20.0)
    told = json.loads(bell.output()[0])
    names = ("SERVICE", "ATTEMPT", "STATE", "WHY", "EXIT_CODE")
    assert [told[f"GRPO_TUI_HOOK_{name}"] for name in names] == ["", "", "failed", "a: exit code 3", ""]


async def test_every_run_of_a_hook_is_opened_in_the_log_by_event_service_time_and_command(bell: Bell) -> None:
    (bell.stage.folder / "hooks.log").write_text("half a line")
    talker = python("import sys; print('out', flush=True); print('err', file=sys.stderr)", bell.stage.token)
    hooks = bell.hooks(hook(*talker))
    hooks.fire(HookEvent.FAILED, service=service(), status=status())
    hooks.fire(HookEvent.FAILED, service=None, status=status())
    await hooks.finish(20.0)
    first = bell.log()
    assert first[:2] == ["half a line", "=== hook run 1: failed · trainer (attempt 2)"]
    assert first[2].startswith("=== attempt 1 · 20")
    assert first[2].endswith(bell.stage.token)
    assert first[3:6] == ["out", "err", "=== hook run 2: failed · the run"]


async def test_only_the_hooks_that_wait_for_an_event_of_this_service_run(bell: Bell) -> None:
    def says(word: str, on: HookEvent, *services: str) -> Hook:
        return hook(*python(f"print({word!r})", bell.stage.token), on=(on,), services=services)

    hooks = bell.hooks(
        says("any", HookEvent.FAILED),
        says("trainer", HookEvent.FAILED, "trainer", "env"),
        says("vllm", HookEvent.FAILED, "vllm"),
        says("ready", HookEvent.READY),
    )
    hooks.fire(HookEvent.FAILED, service=service("trainer"), status=status())
    await hooks.finish(20.0)
    assert sorted(bell.output()) == ["any", "trainer"]


async def test_a_hook_that_names_services_does_not_hear_of_the_run(bell: Bell) -> None:
    hooks = bell.hooks(hook(*python("print('heard')", bell.stage.token), services=("trainer",)))
    hooks.fire(HookEvent.FAILED, service=None, status=status())
    await hooks.finish(20.0)
    assert bell.log() == []


async def test_one_hook_runs_once_at_a_time_in_the_order_of_the_events(bell: Bell) -> None:
    hooks = bell.hooks(hook(*python(PAIR, bell.stage.folder, bell.stage.token)))
    for name in ("a", "b", "c"):
        hooks.fire(HookEvent.FAILED, service=service(name), status=status())
    await until(lambda: bell.is_up("a"))
    for name in ("c", "b", "a"):
        bell.let_go(name)
    await hooks.finish(20.0)
    assert bell.output() == ["a begins", "a ends", "b begins", "b ends", "c begins", "c ends"]


async def test_different_hooks_run_side_by_side(bell: Bell) -> None:
    def waiting(name: str) -> Hook:
        return hook(*python(PAIR.replace("begins", name), bell.stage.folder, bell.stage.token))

    hooks = bell.hooks(waiting("first"), waiting("second"))
    hooks.fire(HookEvent.FAILED, service=service("a"), status=status())
    await until(lambda: sorted(bell.output()) == ["a first", "a second"])
    bell.let_go("a")
    await hooks.finish(20.0)
    assert bell.notices == []


@pytest.mark.slow
async def test_a_hook_that_hangs_is_ended_with_its_children_when_its_time_is_up(bell: Bell) -> None:
    parent = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    child = python("import signal\nwhile 1: signal.pause()", bell.stage.token)
    hooks = bell.hooks(hook(*python(parent, *child), timeout_s=0.5))
    hooks.fire(HookEvent.FAILED, service=service(), status=status())
    await until(lambda: len(bell.notices) == 1)
    assert bell.stage.survivors() == []
    severity, text, whose = bell.notices[0]
    assert (severity, whose) == ("warning", "trainer")
    assert "was killed after 0.5 s" in text
    assert text.endswith(f"raise its timeout_s; its output is in {bell.stage.folder}/hooks.log")


@pytest.mark.slow
async def test_a_hook_that_is_ended_takes_all_that_it_started_along_however_far_it_went(bell: Bell) -> None:
    bell.stage.ports = free_ports(5)
    hooks = bell.hooks(hook(*python(FAMILY, HOLDER, bell.stage.token, *bell.stage.ports)))
    hooks.fire(HookEvent.FAILED, service=service(), status=status())
    await until(lambda: all(map(is_open, bell.stage.ports)))
    await hooks.finish(0.0)
    assert not [port for port in bell.stage.ports if is_open(port)]
    assert bell.stage.survivors() == []


async def test_what_a_hook_leaves_running_in_the_background_is_ended_and_told(bell: Bell) -> None:
    bell.stage.ports = free_ports(1)
    leaving = """
import subprocess, sys
subprocess.Popen([sys.executable, "-I", "-S", "-c", sys.argv[1], *sys.argv[2:]], start_new_session=True, env={})
"""
    hooks = bell.hooks(hook(*python(leaving, HOLDER, bell.stage.ports[0], bell.stage.token)))
    hooks.fire(HookEvent.FAILED, service=service(), status=status())
    await hooks.finish(20.0)
    assert bell.stage.survivors() == []
    assert "a hook must wait for its processes" in bell.notices[0][1]


async def test_a_hook_that_fails_is_a_warning_with_its_exit_code_and_where_its_output_is(bell: Bell) -> None:
    hooks = bell.hooks(hook(*python("import sys; sys.exit(3)", bell.stage.token)))
    hooks.fire(HookEvent.FAILED, service=service(), status=status())
    await hooks.finish(20.0)
    [(severity, text, whose)] = bell.notices
    assert (severity, whose) == ("warning", "trainer")
    assert text.startswith(f"hook {sys.executable}")
    assert text.endswith(
        f"on failed of trainer failed with exit code 3; its output is in {bell.stage.folder}/hooks.log"
    )


async def test_a_hook_that_cannot_start_is_a_warning_that_names_the_program(bell: Bell) -> None:
    hooks = bell.hooks(hook("./no-such-program"))
    hooks.fire(HookEvent.FAILED, service=None, status=status())
    await hooks.finish(20.0)
    [(severity, text, whose)] = bell.notices
    assert (severity, whose) == ("warning", None)
    assert "cannot start ./no-such-program: no such file: correct its argv in the profile" in text


async def test_a_hook_in_a_run_folder_that_is_gone_is_a_warning(bell: Bell, tmp_path: Path) -> None:
    told: list[str] = []
    gone = tmp_path / "gone"
    hooks = Hooks(
        [hook("true")], run=bell.stage.run, run_folder=gone, cwd=tmp_path, notice=lambda _, text, __: told.append(text)
    )
    hooks.fire(HookEvent.FAILED, service=None, status=status())
    await hooks.finish(20.0)
    assert len(told) == 1
    assert "hook true on failed of the run could not be started" in told[0]


async def test_at_the_end_of_the_run_what_still_runs_is_ended_and_what_waits_is_dropped(bell: Bell) -> None:
    hooks = bell.hooks(hook(*python(PAIR, bell.stage.folder, bell.stage.token)))
    for name in ("a", "b"):
        hooks.fire(HookEvent.FAILED, service=service(name), status=status())
    await until(lambda: bell.is_up("a"))
    await hooks.finish(0.0)
    assert bell.stage.survivors() == []
    assert not bell.is_up("b")
    texts = sorted(text for _, text, _ in bell.notices)
    assert "of a was killed because the run is over" in texts[0]
    assert "of b was not run: the run was over before its turn came" in texts[1]


async def test_a_hook_that_never_gets_its_turn_does_not_queue_up_without_end(bell: Bell) -> None:
    hooks = bell.hooks(hook(*python(PAIR, bell.stage.folder, bell.stage.token)))
    for number in range(MAX_WAITING + 2):
        hooks.fire(HookEvent.FAILED, service=service(str(number)), status=status())
    left_out = [text for _, text, _ in bell.notices]
    assert [text.partition(" of ")[2].partition(":")[0] for text in left_out] == ["16 is skipped", "17 is skipped"]
    await hooks.finish(0.0)


async def test_a_finished_hook_leaves_no_file_of_its_keeper(bell: Bell) -> None:
    hooks = bell.hooks(hook(*python("print('done')", bell.stage.token)))
    hooks.fire(HookEvent.FAILED, service=service(), status=status())
    await hooks.finish(20.0)
    assert bell.output() == ["done"]
    assert list((bell.stage.folder / KEEPERS).iterdir()) == []


async def test_a_hook_is_none_of_the_processes_of_a_service(bell: Bell) -> None:
    hooks = bell.hooks(hook(*python(PAIR, bell.stage.folder, bell.stage.token)))
    hooks.fire(HookEvent.FAILED, service=service("a"), status=status())
    await until(lambda: bell.is_up("a"))
    assert processes_of_run(bell.stage.run, "a") == []
    assert len(processes_of_run(bell.stage.run)) == 2  # the hook and its keeper
    bell.let_go("a")
    await hooks.finish(20.0)


@pytest.mark.slow
async def test_a_hook_outlives_its_daemon_and_the_next_one_ends_it_when_its_time_is_up(bell: Bell) -> None:
    hanging = python("import signal, sys; open(sys.argv[1], 'w').close()\nwhile 1: signal.pause()")
    up = bell.stage.folder / "up"
    arguments = [bell.stage.run, str(bell.stage.folder), str(up), *hanging, str(up), bell.stage.token]
    daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", DAEMON, *arguments)
    assert await daemon.wait() == -signal.SIGKILL
    assert len(bell.stage.survivors()) == 2  # the hook and its keeper
    hooks = bell.hooks(hook(*python("print('next')", bell.stage.token), timeout_s=0.01, on=(HookEvent.READY,)))
    hooks.take_over()
    await until(lambda: bool(bell.notices))
    assert bell.stage.survivors() == []
    assert "hook run 1, started by an earlier supervisor, was killed after 0.01 s" in bell.notices[0][1]


async def test_runs_of_hooks_are_numbered_on_by_the_next_daemon(bell: Bell) -> None:
    hooks = bell.hooks(hook(*python(PAIR, bell.stage.folder, bell.stage.token)))
    hooks.fire(HookEvent.FAILED, service=service("a"), status=status())
    await until(lambda: bell.is_up("a"))
    later = bell.hooks(hook(*python("print('next')", bell.stage.token)))
    later.fire(HookEvent.FAILED, service=None, status=status())
    await later.finish(20.0)
    assert "=== hook run 2: failed · the run" in bell.log()
    bell.let_go("a")
    await hooks.finish(20.0)
