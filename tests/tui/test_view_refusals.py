"""Who is in the way of a service, read from the words that the supervisor really says."""

from pathlib import Path

from screen_fakes import service

from grpo_tui.supervisor.owners import Owner
from grpo_tui.supervisor.ports import Holder
from grpo_tui.supervisor.proc import Marker, Stat, user_name
from grpo_tui.view.crash_files import newest_report
from grpo_tui.view.refusals import Obstacle, obstacles

ANN = 0
"""A user that every machine has."""


def held(port: int, pid: int, command: str, *, run: str | None = None) -> str:
    """The supervisor's words for a port that is held by a process of `ANN`."""
    process = Stat(
        pid=pid, comm="x", state="S", parent=1, group=pid, session=pid, cpu_ticks=0, start_ticks=1, rss_pages=1
    )
    mark = None if run is None else Marker(run=run, service="vllm", run_folder=f"/logs/{run}")
    owner = Owner(process=process, uid=ANN, command=command, mark=mark, is_supervised=True)
    return Holder(port=port, owner=owner).words()


def refused(why: str) -> tuple[Obstacle, ...]:
    return obstacles(service("vllm", state="failed", is_refused=True, why=why))


def test_a_stranger_of_our_user_may_be_ended_and_one_of_another_user_not() -> None:
    (found,) = refused(held(9001, 4242, "python app.py"))
    assert (found.is_port, found.pid, found.user) == (True, 4242, user_name(ANN))
    assert found.may_be_ended_by(user_name(ANN))
    assert not found.may_be_ended_by("somebody else")


def test_a_service_of_another_run_is_not_offered() -> None:
    (found,) = refused(held(9001, 4242, "python app.py", run="hermes"))
    assert found.is_port
    assert not found.may_be_ended_by(user_name(ANN))


def test_a_process_that_cannot_be_seen_is_not_offered() -> None:
    owner = Owner(process=None, uid=ANN, command="", mark=None, is_supervised=False)
    (found,) = refused(Holder(port=9001, owner=owner).words())
    assert not found.may_be_ended_by(user_name(ANN))


def test_several_obstacles_are_told_apart_though_a_command_holds_semicolons() -> None:
    first, second = held(9001, 1, "sh -c a; b; c"), held(9002, 2, "nginx")
    gpu = "GPU 0 has 1.0 GB free, and vllm needs 36.0 GB; 60.0 GB held by pid 7 (user x): y; to do: end pid 7"
    found = refused("; ".join([first, second, gpu]))
    assert [each.words for each in found] == [first, second, gpu]
    assert [each.pid for each in found] == [1, 2, None]


def test_a_service_that_was_not_refused_has_nobody_in_its_way() -> None:
    assert obstacles(service("vllm", state="failed", why=held(9001, 1, "x"))) == ()


def test_a_run_folder_that_is_gone_has_no_crash_report(tmp_path: Path) -> None:
    assert newest_report(tmp_path / "gone", "vllm") is None
