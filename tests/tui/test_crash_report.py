"""The text of a crash report: the cause comes first, secrets are masked, and every value may be unknown."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launches import keeper_state, launch

from grpo_engine.wire.access_token import write_token
from grpo_engine.wire.supervisor import GpuStatus, RunState, RunStatus, ServiceState, ServiceStatus
from grpo_tui.services.base import Launch, NeedCondition
from grpo_tui.supervisor.keeper.client import EndedEntry, KeeperState
from grpo_tui.supervisor.report.crash_report import (
    OTHER_LINES,
    OWN_LINES,
    compose,
    error_lines,
    hints,
    secrets,
)
from grpo_tui.supervisor.report.exits import exit_text
from grpo_tui.supervisor.report.machine_facts import Facts, Space

NOW = 1_790_000_000.0
UNKNOWN = Facts(at=NOW, host="h", kernel="Linux 6", python="3.12")
PLENTY = Space(free_bytes=500 * 10**9, total_bytes=10**12)
CHAIN = """\
step 119: loss 0.0119
Traceback (most recent call last):
  File "loop.py", line 88, in run
    except ValueError:
  File "module.py", line 1751, in call
    raise RuntimeError("no")
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "main.py", line 12, in main
grpo_engine.errors.TrainError: step 120 failed
""".splitlines()


def service(name: str, state: ServiceState = ServiceState.READY, **known: object) -> ServiceStatus:
    return ServiceStatus(name=name, kind="command", state=state, log=f"/runs/r/{name}.log", **known)


def status(*services: ServiceStatus, **known: object) -> RunStatus:
    return RunStatus(run="r", profile="p", state=RunState.DEGRADED, supervisor=None, services=list(services), **known)


def trainer(**known: object) -> Launch:
    needs = {"vllm": NeedCondition.READY}
    return launch("trainer", **{"kind": "trainer", "argv": ("train",), "cwd": Path("/work"), "needs": needs, **known})


def attempt(number: int, **known: object) -> KeeperState:
    return keeper_state("trainer", number, **{"started_at": NOW - 3600, "ended_at": NOW, "exit_code": 1, **known})


def report(
    *services: ServiceStatus, of: Launch | None = None, run: Mapping[str, Any] | None = None, **known: Any
) -> list[str]:
    """The lines of a report about which everything is unknown but this."""
    about = status(*(services or (service("trainer", ServiceState.FAILED),)), **(run or {}))
    unknown: dict[str, Any] = {"history": (), "logs": {}, "metrics": {}, "facts": UNKNOWN, "oom_kills": None}
    return compose(about, of or trainer(), attempt=2, **{"why": "exit code 1", **unknown, **known}).splitlines()


def section(lines: Sequence[str], title: str) -> list[str]:
    """The lines below a title, up to the next blank one."""
    start = next(index for index, line in enumerate(lines) if line.startswith(f"--- {title}"))
    body = lines[start + 1 :]
    return list(body[: body.index("")] if "" in body else body)


def test_the_cause_is_in_the_first_ten_lines() -> None:
    head = report(
        service("vllm", ServiceState.BACKOFF, why="ended by SIGKILL; restart 1 of 5 after 2.0 s"),
        service("trainer", ServiceState.FAILED, why="exit code 1; last lines:\n  x"),
        why="exit code 1; last lines:\n  x",
        history=[attempt(2, ended=(EndedEntry(pid=9, comm="python", how="SIGKILL"),))],
        logs={"trainer": CHAIN},
        run={"started_at": NOW - 7300},
    )[:10]
    assert head[0] == "trainer failed: exit code 1"
    assert head[2:5] == [
        "  log says  torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "  log says  grpo_engine.errors.TrainError: step 120 failed",
        "  hint      the GPU table below shows which process held it",
    ]
    assert head[5] == "  also      vllm, which it needs, is backoff: ended by SIGKILL; restart 1 of 5 after 2.0 s"
    assert head[6].endswith(", 60 min after its start, 2.0 h into the run")
    assert head[7:9] == [
        "  attempt   2 of trainer (kind trainer) in run r, profile p",
        "  leftover  its keeper had to terminate pid 9 (python) by SIGKILL",
    ]


def test_every_section_has_words_for_what_is_unknown() -> None:
    lines = report()
    assert lines[0] == "trainer failed: exit code 1"
    assert section(lines, "Log of trainer") == ["(no output in this attempt)"]
    assert section(lines, "Attempts of trainer") == ["(none recorded)"]
    assert section(lines, "GPUs") == ["(none found)"]
    assert section(lines, "Latest metrics") == ["(none yet)"]
    assert section(lines, "Machine") == [
        "host      h, Linux 6, - cores, load -",
        "memory    unknown",
        "disk      unknown",
        "/dev/shm  unknown",
        "driver    no NVIDIA driver loaded",
        "python    3.12",
        "packages  none installed",
    ]


def test_the_failed_service_comes_first_and_with_more_lines_than_the_others() -> None:
    many = [f"line {number}" for number in range(100)]
    lines = report(service("api"), service("trainer", ServiceState.FAILED), logs={"api": many, "trainer": many})
    titles = [line for line in lines if line.startswith("--- Log")]
    assert [title.split()[3] for title in titles] == ["trainer,", "api,"]
    assert section(lines, "Log of trainer") == many[-OWN_LINES:]
    assert section(lines, "Log of api") == many[-OTHER_LINES:]


def test_every_service_is_in_the_table_with_its_explanation() -> None:
    trainer = service("trainer", ServiceState.FAILED, attempt=2, exit_code=1, why="exit code 1; last lines:\n  x")
    api = service("api", pid=12, attempt=1, started_at=NOW - 60, rss_bytes=90_000_000, gpu_memory_bytes=2_500_000_000)
    assert section(report(api, trainer), "All services") == [
        "service  state   attempt  pid  up      memory  GPU memory  exit  why",
        "api      ready   1        12   60.0 s  90 MB   2.5 GB      -",
        "trainer  failed  2        -    -       -       -           1     exit code 1",
    ]


def test_a_gpu_is_listed_with_the_holders_of_its_memory() -> None:
    sizes: dict[str, Any] = {
        "memory_used_bytes": 139_900_000_000,
        "memory_total_bytes": 150_800_000_000,
        "other_bytes": 3_900_000_000,
    }
    held = {"vllm": 66_000_000_000}
    gpu = GpuStatus(index=0, uuid="u", name="NVIDIA H200", utilization_percent=99.0, by_service=held, **sizes)
    [line] = section(report(run={"gpus": [gpu]}), "GPUs")
    assert line == "0  NVIDIA H200  139.9 GB of 150.8 GB  99 % busy  vllm 66.0 GB, others 3.9 GB"
    unknown = GpuStatus(
        index=1, uuid="u", name="X", memory_used_bytes=None, memory_total_bytes=None, utilization_percent=None
    )
    assert section(report(run={"gpus": [unknown]}), "GPUs") == ["1  X  - of -  -  use by process unknown"]
    assert section(report(run={"gpu_note": "no NVIDIA driver"}), "GPUs") == ["(no NVIDIA driver)"]


def test_attempts_are_listed_with_how_they_ended() -> None:
    lines = report(history=[attempt(1, exit_code=-9), attempt(2, error="cannot start x: no such file")])
    first, second = section(lines, "Attempts of trainer")
    assert first.startswith("attempt 1  20")
    assert first.endswith("ran 60 min  ended by SIGKILL")
    assert second.endswith("cannot start x: no such file")


def test_metrics_begin_with_the_step_and_a_log_is_shown_without_control_characters() -> None:
    lines = report(
        metrics={"grpo/ess": 0.5, "step": 12.0, "train/lr": 1e-6},
        logs={"trainer": ["\x1b[1;31mERROR\x1b[0m bad\x07 end"]},
    )
    assert section(lines, "Latest metrics") == ["step      12", "grpo/ess  0.5", "train/lr  1e-06"]
    assert section(lines, "Log of trainer") == ["ERROR bad end"]


def test_what_the_service_needs_comes_first_among_the_others_in_trouble() -> None:
    lines = report(
        service("env", ServiceState.UNHEALTHY, why="no liveness for 10 s: port 9 is closed"),
        service("vllm", attempt=2, restarts=1, started_at=NOW - 5),
        service("trainer", ServiceState.FAILED),
        history=[attempt(2)],
    )
    first, second = [line for line in lines if line.startswith("  also")]
    assert first.startswith("  also      vllm, which it needs, was restarted during this attempt, at 20")
    assert second == "  also      env is unhealthy: no liveness for 10 s: port 9 is closed"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], []),
        (["only words", "at the end"], ["at the end"]),
        (["2026 ERROR no disk", "bye"], ["2026 ERROR no disk"]),
        (["bash: line 1: 12 Segmentation fault  ./x", "bye"], ["bash: line 1: 12 Segmentation fault  ./x"]),
        (["    raise ValueError('x')", "ValueError: x"], ["ValueError: x"]),
        (["KeyboardInterrupt"], ["KeyboardInterrupt"]),
        (["AError: 1", "BError: 2", "CError: 3", "CError: 3", "DError: 4"], ["AError: 1", "CError: 3", "DError: 4"]),
        (["(Engine pid=9) ERROR [core.py:7] x.MyError: root"], ["(Engine pid=9) ERROR [core.py:7] x.MyError: root"]),
    ],
)
def test_the_lines_that_look_most_like_the_cause(lines: list[str], found: list[str]) -> None:
    assert error_lines(lines) == found


def test_after_a_signal_only_an_error_of_the_last_seconds_is_shown() -> None:
    def said(*lines: str, exit_code: int = -9) -> list[str]:
        ended = service("trainer", ServiceState.FAILED, exit_code=exit_code)
        head = report(ended, why=exit_text(exit_code), history=[attempt(2)], logs={"trainer": lines})
        return [line.removeprefix("  log says  ") for line in head if line.startswith("  log says")]

    def at(age_s: int, words: str) -> str:
        return f"{time.strftime('%H:%M:%S', time.localtime(NOW - age_s))} {words}"

    healed = (at(20, "WARNING x: lost"), "httpx.ConnectError: refused", at(19, "INFO x: Ready"))
    assert said(*healed) == []
    assert said(*healed, exit_code=1) == ["httpx.ConnectError: refused"]
    assert said(*healed, at(1, "INFO x: step"), "Aborted", exit_code=-6) == ["Aborted"]
    assert said("MyError: no times here") == ["MyError: no times here"]


@pytest.mark.parametrize(
    ("exit_code", "oom_kills", "words"),
    [
        (1, 2, "out-of-memory killer killed 2 processes"),
        (-9, 1, "out-of-memory killer killed a process"),
        (-9, 0, "neither the supervisor nor the out-of-memory killer sent SIGKILL"),
        (137, None, "probably by the kernel's out-of-memory killer"),
        (-7, None, "/dev/shm is full"),
        (-11, 0, "PYTHONFAULTHANDLER"),
    ],
)
def test_an_exit_by_a_signal_has_a_hint(exit_code: int, oom_kills: int | None, words: str) -> None:
    [hint] = hints(exit_code, exit_text(exit_code), [], UNKNOWN, oom_kills)
    assert words in hint


def test_an_ordinary_exit_on_a_machine_with_room_has_no_hint_and_a_full_disk_is_one() -> None:
    roomy = replace(UNKNOWN, disk=PLENTY, shared_memory=PLENTY, memory=PLENTY)
    assert list(hints(1, "exit code 1", ["step 1"], roomy, 0)) == []
    assert list(hints(None, "", [], roomy, None)) == []
    assert list(hints(-9, "no answer for 60 s", [], roomy, None)) == []  # the supervisor's
    full = replace(UNKNOWN, disk=Space(free_bytes=12_000_000, total_bytes=10**12))
    assert list(hints(1, "exit code 1", [], full, 0)) == ["the disk of the run folder is full: 12 MB free of 1000.0 GB"]


def test_secrets_on_the_command_line_of_a_service_are_masked() -> None:
    argv = ("train", "--api-key", "sk-1", "--url", "http://u:pw@h")
    command = section(report(of=trainer(argv=argv)), "Command of trainer")[1]
    assert command == "train --api-key '***' --url 'http://u:***@h'"


def test_secret_values_are_the_token_and_those_of_variables_named_so_and_of_files(tmp_path: Path) -> None:
    write_token(tmp_path, "token-of-the-run")
    launches = [
        trainer(env={"MY_PASSWORD": "longest-of-all", "DEBUG_TOKEN": "short", "MODE": "not-a-secret"}),
        trainer(env={"ENDPOINT": "out-of-a-file"}, env_from_files=("ENDPOINT",)),
    ]
    found = secrets(launches, {"OPENAI_API_KEY": "sk-12345678", "HOME": "/home/somebody"}, tmp_path)
    assert found == ["token-of-the-run", "longest-of-all", "out-of-a-file", "sk-12345678"]
