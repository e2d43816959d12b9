"""The real MPS daemon of a run with two clients: memory by service, and what is left after its server or a client died.

Where this machine lets a run have no daemon (a container, MIG), the tests are skipped with the reason that `mps` gives.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from workplace import Workplace, open_workplace, service, until

from grpo_engine.wire.supervisor import ServiceState

CLIENT = """
import signal, sys, time, torch
held = torch.ones(1 << 28, device="cuda")  # 1 GiB
def fault(*_):
    held[torch.tensor([1 << 40], device="cuda")] = 0  # out of bounds: asserted by the kernel
    torch.cuda.synchronize()
signal.signal(signal.SIGUSR1, fault)
torch.cuda.synchronize()
print("up", flush=True)
while True:
    held.mul_(1.0).sum().item()
    time.sleep(0.05)
"""
UP = "{ log = '^up$', interval_s = 0.1 }"
LIMIT_S = 120.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A run of two services on GPU 0 that compute at the same time, of which nothing may be left."""
    with open_workplace(tmp_path) as workplace:
        client = {"gpus": [0], "ready": UP}
        workplace.profile(service("server", CLIENT, **client), service("trainer", CLIENT, **client))
        profile = tmp_path / "profiles" / "p.toml"
        profile.write_text(profile.read_text().replace('"-I", "-S", ', ""))  # torch is among the site packages
        workplace.succeed("up", "--profile", "p", "--detach", "--wait", "ready", limit_s=LIMIT_S)
        mps = [each for each in workplace.status().services if each.name == "mps"]
        if not mps or mps[0].state is not ServiceState.READY:
            workplace.succeed("down")
            pytest.skip(f"no MPS here: {mps[0].why if mps else 'see the plan'}")
        yield workplace


def until_restarted(place: Workplace) -> None:
    """Wait until each of the three runs in its second attempt; a service that has failed is an error."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        services = place.status().services
        assert not [each.why for each in services if each.state is ServiceState.FAILED]
        if all((each.state, each.attempt) == (ServiceState.READY, 2) for each in services):
            return
        assert time.monotonic() < deadline, [(each.name, each.state, each.attempt, each.why) for each in services]
        time.sleep(0.2)


def server_pid(place: Workplace) -> int:
    """The MPS server, from the line that says that it is ready."""
    (line,) = [each for each in place.log("mps").splitlines() if each.startswith("MPS: ready")][-1:]
    return int(line.split("server pid ")[1].split(",")[0])


def test_memory_is_shown_by_service_and_the_server_on_a_line_of_its_own(place: Workplace) -> None:
    until(lambda: all(place.service(name).gpu_memory_bytes for name in ("mps", "server", "trainer")))
    held = {name: place.service(name).gpu_memory_bytes or 0 for name in ("mps", "server", "trainer")}
    assert held["mps"] < 1 << 29
    assert min(held["server"], held["trainer"]) >= 1 << 30


def test_a_killed_server_restarts_the_daemon_and_both_clients(place: Workplace) -> None:
    os.kill(server_pid(place), signal.SIGKILL)
    until_restarted(place)


def test_a_fault_of_one_client_restarts_the_daemon_and_both_clients(place: Workplace) -> None:
    os.kill(place.pid("server"), signal.SIGUSR1)
    until_restarted(place)
    assert "ended by a failure of mps" in place.log()


def test_a_killed_client_that_is_restarted_leaves_the_other_one_alone(place: Workplace) -> None:
    before = place.pid("trainer")
    os.kill(place.pid("server"), signal.SIGKILL)
    place.until_state(ServiceState.FAILED, "server")
    place.succeed("start", "server", "--wait", limit_s=LIMIT_S)
    assert (place.pid("trainer"), place.service("mps").attempt) == (before, 1)
