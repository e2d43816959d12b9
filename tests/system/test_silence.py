"""Who says nothing is waited for no longer than needed: services at rest, suspended processes, broken programs."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from workplace import POLITE, PYTHON, Workplace, open_workplace, service

from grpo_tui.supervisor.processes import living_keepers


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as place:
        yield place


def test_a_restart_starts_a_service_that_was_stopped_though_nothing_else_happens(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    assert place.grpo("stop", "a", "--wait").returncode == 0
    done = place.grpo("restart", "a", "--wait", "--timeout", "20")
    assert done.returncode == 0, done.stderr
    assert place.grpo("down").returncode == 0


def test_a_suspended_keeper_hears_a_stop_and_is_not_taken_for_stuck(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    (keeper,) = living_keepers(place.run_folder())
    os.kill(keeper.keeper.pid, signal.SIGSTOP)
    done = place.grpo("stop", "a", "--wait")
    assert done.returncode == 0, done.stderr
    (a,) = place.status().services
    assert (a.state, a.exit_code) == ("stopped", -signal.SIGTERM)
    assert place.grpo("down").returncode == 0


def test_the_status_of_a_run_whose_supervisor_is_suspended_says_so_and_not_that_it_is_gone(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    supervisor = place.status().supervisor
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        shown = place.grpo("status").stdout
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    assert "the supervisor does not answer (nothing in 3 s)" in shown
    assert "is gone" not in shown
    assert place.grpo("down").returncode == 0


def test_a_program_that_breaks_with_a_traceback_does_not_replace_a_supervisor(place: Workplace) -> None:
    place.profile(service("a", POLITE))
    place.up()
    old = place.status().supervisor
    broken = place.folder / "broken"
    broken.write_text("#!/bin/sh\necho 'ImportError: half installed' >&2\nexit 1\n")
    broken.chmod(0o755)
    program = f"import sys; from grpo_tui.client import launch; launch.sys.executable = {str(broken)!r}\n"
    program += "from grpo_tui.cli import main; sys.argv[1:] = ['upgrade']; main()"
    done = subprocess.run(
        [PYTHON, "-P", "-c", program], cwd=place.folder, env=place.environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "a new supervisor cannot be started: ImportError: half installed" in done.stderr
    assert place.status().supervisor == old
    assert place.grpo("down").returncode == 0
