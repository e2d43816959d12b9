"""Hooks with real processes: their environment, their order, and that none of their processes is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from stage import FAMILY, HOLDER, Stage, free_ports, is_open, open_stage, python, until

from grpo_engine.wire.run_folder import KEEPERS
from grpo_engine.wire.supervisor import RunState, RunStatus, ServiceState, ServiceStatus
from grpo_tui.services.hook import Hook, HookEvent
from grpo_tui.supervisor.hooks import MAX_WAITING, Hooks
from grpo_tui.supervisor.keeper.proc import processes_of_run

PRINTS_ENVIRONMENT = """
import json, os, sys
print(json.dumps({"cwd": os.getcwd(), "stdin": sys.stdin.read(), "session": os.getsid(0) != int(sys.argv[1]),
    **{name: value for name, value in os.environ.items() if name.startswith("GRPO_TUI_")}}))
"""
"""Prints its environment; its argument is the session of the process that starts it."""

WAITS = """
import os, sys, time
name, marks = os.environ["GRPO_TUI_HOOK_SERVICE"], sys.argv[1]
open(f"{marks}/{name}.up", "w")
print(name, "begins", flush=True)
while not os.path.exists(f"{marks}/{name}.go"): time.sleep(0.005)
print(name, "ends", flush=True)
"""
"""Begins, waits for the file NAME.go, ends."""

SUPERVISOR = """
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
"""Starts a hook and is killed."""


@dataclass(kw_only=True)
class HookRun:
    """Hooks of one run, and the notices about them."""

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

    def hook(self, program: str, *arguments: object, **settings: object) -> Hook:
        """A hook that runs a Python program."""
        return hook(*python(program, *arguments, self.stage.token), **settings)  # type: ignore[arg-type]

    def start(self, *hooks: Hook, of: Sequence[ServiceStatus | None]) -> Hooks:
        """Run hooks on the failures of these services; None is the run."""
        running = self.hooks(*hooks)
        for failed in of:
            running.fire(HookEvent.FAILED, service=failed, status=status())
        return running

    async def run(self, *hooks: Hook, of: ServiceStatus | None) -> None:
        """Run hooks on one failure, and wait until they have ended."""
        await self.start(*hooks, of=[of]).finish(60.0)

    def log(self) -> list[str]:
        path = self.stage.folder / "hooks.log"
        return path.read_text().splitlines() if path.exists() else []

    def output(self) -> list[str]:
        """The output of hooks, without the lines that begin their runs."""
        return [line for line in self.log() if line and not line.startswith("===")]

    def release(self, name: str) -> None:
        (self.stage.folder / f"{name}.go").touch()

    def is_up(self, name: str) -> bool:
        return (self.stage.folder / f"{name}.up").exists()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[HookRun]:
    (tmp_path / "profile").mkdir()
    with open_stage(tmp_path) as stage:
        yield HookRun(stage=stage)


def service(name: str = "trainer", **changes: object) -> ServiceStatus:
    values = {"kind": "command", "state": ServiceState.FAILED, "attempt": 2, "exit_code": 3, "why": "exit code 3"}
    return ServiceStatus(name=name, log=f"{name}.log", **{**values, **changes})


def status(*services: ServiceStatus, state: RunState = RunState.RUNNING) -> RunStatus:
    return RunStatus(run="r", profile="p", state=state, supervisor=None, services=list(services))


def hook(*argv: str, on: tuple[HookEvent, ...] = (HookEvent.FAILED,), **settings: object) -> Hook:
    return Hook(on=on, argv=argv, **settings)


async def test_a_hook_has_the_event_its_service_and_the_run_in_its_environment(run: HookRun) -> None:
    hooks = run.hooks(run.hook(PRINTS_ENVIRONMENT, os.getsid(0)))
    failed = service(why="exit code 3; last lines:\n  bo\0om")
    hooks.fire(HookEvent.FAILED, service=failed, status=status(failed))
    await hooks.finish(60.0)
    environment = json.loads(run.output()[0])
    assert environment == {
        "cwd": str(run.stage.folder / "profile"),
        "stdin": "",
        "session": True,
        "GRPO_TUI_RUN": run.stage.run,
        "GRPO_TUI_RUN_FOLDER": str(run.stage.folder),
        "GRPO_TUI_SERVICE": "hooks",
        "GRPO_TUI_ATTEMPT": "1",
        "GRPO_TUI_HOOK_EVENT": "failed",
        "GRPO_TUI_HOOK_SERVICE": "trainer",
        "GRPO_TUI_HOOK_ATTEMPT": "2",
        "GRPO_TUI_HOOK_STATE": "failed",
        "GRPO_TUI_HOOK_WHY": "exit code 3; last lines:\n  boom",
        "GRPO_TUI_HOOK_EXIT_CODE": "3",
    }
    assert run.notices == []


async def test_a_hook_on_the_end_of_a_run_has_the_services_that_failed(run: HookRun) -> None:
    hooks = run.hooks(run.hook(PRINTS_ENVIRONMENT, 0))
    services = (service("a"), service("b", state=ServiceState.STOPPED, why="stopped by request"))
    hooks.fire(HookEvent.FAILED, service=None, status=status(*services, state=RunState.FAILED))
    await hooks.finish(60.0)
    environment = json.loads(run.output()[0])
    names = ("SERVICE", "ATTEMPT", "STATE", "WHY", "EXIT_CODE")
    assert [environment[f"GRPO_TUI_HOOK_{name}"] for name in names] == ["", "", "failed", "a: exit code 3", ""]


async def test_every_hook_run_begins_in_the_log_with_its_event_service_time_and_command(run: HookRun) -> None:
    (run.stage.folder / "hooks.log").write_text("half a line")
    hooks = run.start(
        run.hook("import sys; print('out', flush=True); print('err', file=sys.stderr)"), of=[service(), None]
    )
    await hooks.finish(60.0)
    first = run.log()
    assert first[:2] == ["half a line", "=== hook run 1: failed · trainer (attempt 2)"]
    assert first[2].startswith("=== attempt 1 · 20")
    assert first[2].endswith(run.stage.token)
    assert first[3:6] == ["out", "err", "=== hook run 2: failed · the run"]


async def test_only_the_hooks_on_this_event_of_this_service_run(run: HookRun) -> None:
    def says(word: str, on: HookEvent, *services: str) -> Hook:
        return run.hook(f"print({word!r})", on=(on,), services=services)

    hooks = run.hooks(
        says("any", HookEvent.FAILED),
        says("trainer", HookEvent.FAILED, "trainer", "env"),
        says("vllm", HookEvent.FAILED, "vllm"),
        says("ready", HookEvent.READY),
    )
    hooks.fire(HookEvent.FAILED, service=service(), status=status())
    await hooks.finish(60.0)
    assert sorted(run.output()) == ["any", "trainer"]
    assert list((run.stage.folder / KEEPERS).iterdir()) == []
    await run.run(says("not of a service", HookEvent.FAILED, "trainer"), of=None)
    assert sorted(run.output()) == ["any", "trainer"]


async def test_a_hook_runs_once_at_a_time_in_the_order_of_the_events(run: HookRun) -> None:
    hooks = run.start(run.hook(WAITS, run.stage.folder), of=[service(name) for name in ("a", "b", "c")])
    await until(lambda: run.is_up("a"))
    for name in ("c", "b", "a"):
        run.release(name)
    await hooks.finish(60.0)
    assert run.output() == ["a begins", "a ends", "b begins", "b ends", "c begins", "c ends"]


async def test_different_hooks_run_side_by_side(run: HookRun) -> None:
    def waiting(name: str) -> Hook:
        return run.hook(WAITS.replace("begins", name), run.stage.folder)

    hooks = run.start(waiting("first"), waiting("second"), of=[service("a")])
    await until(lambda: sorted(run.output()) == ["a first", "a second"])
    run.release("a")
    await hooks.finish(60.0)
    assert run.notices == []


@pytest.mark.slow
async def test_a_hook_over_its_time_limit_is_killed_with_its_children(run: HookRun) -> None:
    parent = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    child = python("import signal\nwhile 1: signal.pause()", run.stage.token)
    hooks = run.start(hook(*python(parent, *child), timeout_s=0.5), of=[service()])
    await until(lambda: len(run.notices) == 1)
    assert run.stage.survivors() == []
    await hooks.finish(0.0)
    severity, text, whose = run.notices[0]
    assert (severity, whose) == ("warning", "trainer")
    assert "was killed after 0.5 s" in text
    assert text.endswith(f"raise its timeout_s; its output is in {run.stage.folder}/hooks.log")


@pytest.mark.slow
async def test_every_process_that_a_hook_started_is_killed_with_it(run: HookRun) -> None:
    run.stage.ports = free_ports(5)
    hooks = run.start(hook(*python(FAMILY, HOLDER, run.stage.token, *run.stage.ports)), of=[service()])
    await until(lambda: all(map(is_open, run.stage.ports)))
    await hooks.finish(0.0)
    assert not [port for port in run.stage.ports if is_open(port)]
    assert run.stage.survivors() == []


async def test_a_background_process_of_a_hook_is_killed_and_reported(run: HookRun) -> None:
    run.stage.ports = free_ports(1)
    leaving = """
import subprocess, sys
subprocess.Popen([sys.executable, "-I", "-S", "-c", sys.argv[1], *sys.argv[2:]], start_new_session=True, env={})
"""
    await run.run(run.hook(leaving, HOLDER, run.stage.ports[0]), of=service())
    assert run.stage.survivors() == []
    assert "a hook must wait for its processes" in run.notices[0][1]


async def test_a_hook_that_fails_is_a_warning_with_its_exit_code_and_its_log(run: HookRun) -> None:
    await run.run(run.hook("import sys; sys.exit(3)"), of=service())
    [(severity, text, whose)] = run.notices
    assert (severity, whose) == ("warning", "trainer")
    assert text.startswith(f"hook {sys.executable}")
    assert text.endswith(f"on failed of trainer failed with exit code 3; its output is in {run.stage.folder}/hooks.log")


async def test_a_hook_that_cannot_start_is_a_warning_that_names_the_program(run: HookRun) -> None:
    await run.run(hook("./no-such-program"), of=None)
    [(severity, text, whose)] = run.notices
    assert (severity, whose) == ("warning", None)
    assert "cannot start ./no-such-program: no such file: correct its argv in the profile" in text


async def test_a_hook_in_a_deleted_run_folder_is_a_warning(run: HookRun) -> None:
    run.stage.folder /= "deleted"
    await run.run(hook("true"), of=None)
    [(_, text, _)] = run.notices
    assert "hook true on failed of the run could not be started" in text


async def test_at_the_end_of_the_run_hooks_that_run_are_killed_and_those_that_wait_are_dropped(run: HookRun) -> None:
    hooks = run.start(run.hook(WAITS, run.stage.folder), of=[service(name) for name in ("a", "b")])
    await until(lambda: run.is_up("a"))
    await hooks.finish(0.0)
    assert run.stage.survivors() == []
    assert not run.is_up("b")
    texts = sorted(text for _, text, _ in run.notices)
    assert "of a was killed because the run is over" in texts[0]
    assert "of b was not run: the run was over before its turn came" in texts[1]


async def test_the_queue_of_a_hook_is_bounded(run: HookRun) -> None:
    hooks = run.start(run.hook(WAITS, run.stage.folder), of=[service(str(number)) for number in range(MAX_WAITING + 2)])
    skipped = [text for _, text, _ in run.notices]
    assert [text.partition(" of ")[2].partition(":")[0] for text in skipped] == ["16 is skipped", "17 is skipped"]
    await hooks.finish(0.0)


async def test_a_hook_is_not_a_process_of_a_service(run: HookRun) -> None:
    hooks = run.start(run.hook(WAITS, run.stage.folder), of=[service("a")])
    await until(lambda: run.is_up("a"))
    assert processes_of_run(run.stage.run, "a") == []
    assert len(processes_of_run(run.stage.run)) == 2  # the hook and its keeper
    run.release("a")
    await hooks.finish(60.0)


@pytest.mark.slow
async def test_a_hook_of_a_killed_supervisor_is_killed_by_the_next_one_after_its_time_limit(run: HookRun) -> None:
    hanging = python("import signal, sys; open(sys.argv[1], 'w').close()\nwhile 1: signal.pause()")
    up = run.stage.folder / "up"
    arguments = [run.stage.run, str(run.stage.folder), str(up), *hanging, str(up), run.stage.token]
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", SUPERVISOR, *arguments)
    assert await supervisor.wait() == -signal.SIGKILL
    assert len(run.stage.survivors()) == 2  # the hook and its keeper
    hooks = run.hooks(run.hook("print('next')", timeout_s=0.01, on=(HookEvent.READY,)))
    hooks.take_over()
    await until(lambda: bool(run.notices))
    assert run.stage.survivors() == []
    assert "hook run 1, started by an earlier supervisor, was killed after 0.01 s" in run.notices[0][1]


async def test_the_next_supervisor_continues_the_numbers_of_hook_runs(run: HookRun) -> None:
    hooks = run.start(run.hook(WAITS, run.stage.folder), of=[service("a")])
    await until(lambda: run.is_up("a"))
    later = run.start(run.hook("print('next')"), of=[None])
    await later.finish(60.0)
    assert "=== hook run 2: failed · the run" in run.log()
    run.release("a")
    await hooks.finish(60.0)
