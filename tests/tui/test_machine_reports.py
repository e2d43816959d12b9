"""What the broker and the supervisor say of machines: state, what ran there, and what happens next."""

from __future__ import annotations

import pytest
from launches import launch

from grpo_engine.wire.supervisor import MachinesReport, MachineStatus, PlacedUsage
from grpo_tui.services.base import RestartPolicy
from grpo_tui.supervisor.placement.cluster import Node
from grpo_tui.supervisor.placement.machine_report import MAX_SPARES, Held, Loss, Machines, Seen, machine_statuses
from grpo_tui.supervisor.report.machines import Machines as Reported

LAUNCHES = {
    "trainer": launch("trainer", num_devices=1, restart=RestartPolicy.NEVER),
    "vllm": launch("vllm", num_devices=1, restart=RestartPolicy.ON_FAILURE),
}


def node(number: int, num_free: int = 0) -> Node:
    return Node(id=f"n{number}", name=f"machine-{number}", address="10.0.0.1", num_free=num_free, num_devices=1)


def held(number: int, **changes: object) -> Held:
    values = {"node": node(number), "devices": (0,), "answered_at": 90.0, "since": 90.0, "state": "ready"}
    return Held(**{**values, **changes})  # type: ignore[arg-type]


def machines(*of_run: Held, **changes: object) -> dict[str, MachineStatus]:
    values = {
        "held": of_run,
        "joining": (),
        "spares": (),
        "losses": {},
        "nodes_of": {"trainer": ("n1",), "vllm": ("n2",)},
        "launches": LAUNCHES,
        "listed_at": 99.0,
        "decides_within_s": 10.0,
        "restarts_machines": False,
    }
    return {each.name: each for each in machine_statuses(Machines(**{**values, **changes}))}  # type: ignore[arg-type]


def test_a_lost_machine_says_of_each_service_what_becomes_of_it() -> None:
    losses = {"machine-1": Loss(at=95.0, services=("trainer", "vllm"))}
    lost = held(1, state="lost", since=95.0)
    of = machines(lost, losses=losses, nodes_of={"trainer": ("n1",), "vllm": ("n1",)}, restarts_machines=True)[
        "machine-1"
    ]
    assert (of.state, of.lost_at, of.lost_services) == ("lost", 95.0, ["trainer", "vllm"])
    assert of.next == (
        'trainer is not restarted (restart = "never"): `grpo-tui resume` goes on from its newest checkpoint; '
        "vllm waits up to 60 s for a machine with 1 free device; the machine is started again"
    )


def test_what_ran_on_a_lost_machine_is_placed_or_has_room_elsewhere() -> None:
    losses = {"machine-2": Loss(at=95.0, services=("vllm",))}
    lost, spare = held(2, state="lost"), Seen(node=node(3, num_free=1), since=80.0)
    before = machines(held(1), lost, spares=(spare,), losses=losses)
    assert before["machine-2"].next == "vllm is restarted on machine-3, which has 1 free device"
    assert before["machine-3"].num_devices == 0
    assert before["machine-3"].answered_at == 99.0
    after = machines(held(1), lost, held(3), losses=losses, nodes_of={"trainer": ("n1",), "vllm": ("n3",)})
    assert after["machine-2"].next == "vllm is placed on machine-3"
    assert after["machine-3"].next is None
    assert list(after["machine-3"].services) == ["vllm"]


def test_a_machine_that_comes_back_keeps_its_loss_and_joins_until_it_answers() -> None:
    losses = {"machine-2": Loss(at=95.0, services=("vllm",))}
    back = Held(node=Node(id="n9", name="machine-2", address="10.0.0.1", num_free=0, num_devices=1), devices=(0,))
    of = machines(held(1), held(2, state="lost"), back, losses=losses, nodes_of={"vllm": ("n9",)})["machine-2"]
    assert (of.state, of.is_joining, of.lost_at, list(of.services)) == ("silent", True, 95.0, ["vllm"])


def test_a_cluster_of_hundreds_is_not_told_in_full() -> None:
    spares = tuple(Seen(node=node(number), since=0.0) for number in range(2, 300))
    assert list(machines(held(1), spares=spares)) == [f"machine-{number}" for number in range(1, MAX_SPARES + 2)]


READY = MachineStatus(name="m", address="10.0.0.1", state="ready", since=1.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"state": "silent", "next": "later", "services": {"vllm": {}}}, "does not answer; it runs vllm; later"),
        (
            {"state": "lost", "lost_at": 3.0, "lost_services": ["vllm"], "next": "then"},
            "is lost, and with it vllm; then",
        ),
        ({"lost_at": 3.0, "lost_services": ["vllm"]}, "is lost, and with it vllm"),
        ({"is_joining": True, "state": "silent"}, "joins"),
        ({}, None),
    ],
)
def test_people_are_told_of_a_change_once(changes: dict[str, object], told: str | None) -> None:
    reported = Reported()
    assert reported.take(MachinesReport(machines=[READY])) == []
    now = MachineStatus.model_validate({**READY.model_dump(), **changes})
    words = [text for _, text in reported.take(MachinesReport(machines=[now]))]
    assert words == ([] if told is None else [f"m (10.0.0.1) {told}"])
    assert reported.take(MachinesReport(machines=[now])) == []


def test_a_new_supervisor_tells_no_loss_of_long_ago() -> None:
    back = READY.model_copy(update={"lost_at": 3.0, "lost_services": ["vllm"]})
    assert Reported().take(MachinesReport(machines=[back])) == []


def test_a_new_broker_that_does_not_know_a_machine_does_not_say_that_nothing_of_the_run_was_there() -> None:
    reported = Reported()
    reported.take(MachinesReport(machines=[READY.model_copy(update={"services": {"vllm": PlacedUsage()}})]))
    ((severity, text),) = reported.take(MachinesReport(machines=[]))
    assert (severity, text) == ("error", "m (10.0.0.1) has left the cluster, and with it vllm")


def test_a_machine_without_anything_of_the_run_that_leaves_is_named() -> None:
    reported = Reported()
    reported.take(MachinesReport(machines=[READY]))
    ((severity, text),) = reported.take(MachinesReport(machines=[]))
    assert (severity, text) == ("warning", "m (10.0.0.1) has left the cluster; nothing of the run was there")


def test_a_service_on_two_machines_uses_what_both_say_and_a_lost_one_says_nothing() -> None:
    reported = Reported()
    usage = [PlacedUsage(cpu_percent=50.0, rss_bytes=2, gpu_memory_bytes=None), PlacedUsage(rss_bytes=3)]
    both = [status_of(f"machine-{number}", {"trainer": each}) for number, each in enumerate(usage, 1)]
    reported.take(MachinesReport(machines=both))
    assert reported.of("trainer") == ("machine-1", "machine-2")
    assert reported.usage() == {"trainer": PlacedUsage(cpu_percent=50.0, rss_bytes=5)}
    reported.take(MachinesReport(machines=[both[0].model_copy(update={"state": "lost"}), both[1]]))
    assert reported.of("trainer") == ("machine-2",)
    assert reported.usage() == {"trainer": usage[1]}


def status_of(name: str, services: dict[str, PlacedUsage]) -> MachineStatus:
    return MachineStatus(name=name, address="10.0.0.1", state="ready", since=90.0, services=services)
